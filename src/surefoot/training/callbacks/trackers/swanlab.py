"""SwanLab. Without a login, or where it does not answer, the run is written offline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .tracker import Facts, TrackedRun, ignored, scalars

_STATES = {"complete": "success", "stopped": "aborted"}
_OFFLINE = ("offline", "local")


@dataclass
class SwanLab:
    """The run is ``resume="allow"`` with an id of its own, so all launches are one curve."""

    run: Any
    place: str
    event = ignored

    def log(self, record: Mapping[str, float], step: int, line: int) -> None:
        """Scalars of a step."""
        self.run.log(scalars(record), step=step)

    def finish(self, outcome: str, facts: Facts) -> None:
        """``success``, ``aborted`` or ``crashed``, with the error."""
        state = _STATES.get(outcome, "crashed")
        error = str(facts.get("error") or outcome) if state == "crashed" else None
        self.run.finish(state=state, error=error)


def open_run(tracked: TrackedRun) -> SwanLab:
    """Open the run in SwanLab's cloud if it can be."""
    mode = os.environ.get("SWANLAB_MODE", "online").lower()
    if mode == "disabled":
        return SwanLab(_opened(tracked, mode), "nowhere, as SWANLAB_MODE is disabled")
    if tracked.is_offline or mode in _OFFLINE:
        return _offline(tracked, mode if mode in _OFFLINE else "offline", "")
    try:
        run = _opened(tracked, "online")
    except Exception as error:  # whatever the package raises, the run is not to miss its curve
        return _offline(tracked, "offline", f", as it cannot be opened online ({error})")
    return SwanLab(run, str(getattr(run, "url", None) or "SwanLab"))


def _offline(tracked: TrackedRun, mode: str, why: str) -> SwanLab:
    run = _opened(tracked, mode)
    folder = max(tracked.files.glob("run-*"), default=tracked.files)  # their names begin with times
    return SwanLab(run, f"{mode}{why}; `swanlab sync {folder}` sends it")


def _opened(tracked: TrackedRun, mode: str) -> Any:
    import swanlab

    settings = swanlab.Settings(interactive=False)
    return swanlab.init(
        project=tracked.project or settings.project.name or "surefoot",
        name=tracked.name,
        id=tracked.id,
        resume="allow",
        log_dir=str(tracked.files),
        config=dict(tracked.config),
        mode=mode,
        reinit=True,
        settings=settings,
    )
