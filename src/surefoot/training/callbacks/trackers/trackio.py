"""Trackio: local files, or the Space or server that its own environment variables name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .tracker import Facts, TrackedRun, ignored, scalars

_ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


@dataclass
class Trackio:
    """Trackio knows a run by its name, which therefore ends in a part of the id."""

    run: Any
    place: str
    event = ignored

    def log(self, record: Mapping[str, float], step: int, line: int) -> None:
        """Scalars of a step."""
        self.run.log(scalars(record), step=step)

    def finish(self, outcome: str, facts: Facts) -> None:
        """Write or send what remains."""
        self.run.finish()


def open_run(tracked: TrackedRun) -> Trackio:
    """Open the run."""
    if tracked.is_offline:
        for name in _ELSEWHERE:
            os.environ.pop(name, None)
    import trackio

    project = tracked.project or os.environ.get("TRACKIO_PROJECT") or "surefoot"
    run = trackio.init(
        project,
        name=f"{tracked.name}-{tracked.id[:6]}",
        resume="allow",
        config=dict(tracked.config),
        embed=False,
        auto_log_cpu=False,
        auto_log_gpu=False,
    )
    space = next((os.environ[name] for name in _ELSEWHERE if os.environ.get(name)), None)
    shown = f"`trackio show --project {project}` shows it"
    return Trackio(run, f"{space}" if space else f"on this machine; {shown}")
