"""Weights & Biases. Without a login, or where it does not answer, the run is written offline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .tracker import Facts, TrackedRun, ignored, scalars

STEP = "train/global_step"  # the x axis, as the Hugging Face Trainer has it


@dataclass
class WandB:
    """The run is ``resume="allow"`` with an id of its own, so all launches are one curve."""

    run: Any
    place: str
    event = ignored

    def log(self, record: Mapping[str, float], step: int, line: int) -> None:
        """W&B's own step is the number of the line, which only grows: it drops a smaller one."""
        self.run.log({**scalars(record), STEP: step}, step=line)

    def finish(self, outcome: str, facts: Facts) -> None:
        """A launch that a signal stopped is not a failure."""
        self.run.finish(exit_code=0 if outcome in ("complete", "stopped") else 1)


def open_run(tracked: TrackedRun) -> WandB:
    """Open the run online if it can be."""
    mode = os.environ.get("WANDB_MODE", "online").lower()
    if tracked.is_offline or mode in ("offline", "dryrun"):
        return _offline(tracked, "")
    if mode == "disabled":
        return WandB(_opened(tracked, "disabled"), "nowhere, as WANDB_MODE is disabled")
    try:
        run = _opened(tracked, "online")
    except Exception as error:  # whatever the package raises, the run is not to miss its curve
        return _offline(tracked, f", as it cannot be opened online ({error})")
    return WandB(run, str(run.url))


def _offline(tracked: TrackedRun, why: str) -> WandB:
    run = _opened(tracked, "offline")
    folder = os.path.dirname(run.dir)  # noqa: PTH120 - text for people
    return WandB(run, f"offline{why}; `wandb sync {folder}` sends it")


def _opened(tracked: TrackedRun, mode: Literal["online", "offline", "disabled"]) -> Any:
    import wandb

    run = wandb.init(
        project=tracked.project or os.environ.get("WANDB_PROJECT") or "surefoot",
        name=tracked.name,
        id=tracked.id,
        resume="allow",
        dir=str(tracked.files),
        config=dict(tracked.config),
        allow_val_change=True,
        mode=mode,
        settings=wandb.Settings(silent=True, console="off", disable_git=True),
    )
    run.define_metric(STEP)
    run.define_metric("*", step_metric=STEP, step_sync=True)
    return run
