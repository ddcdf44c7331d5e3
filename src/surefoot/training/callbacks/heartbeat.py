"""Heartbeat of a run: that it lives, its step, its memory, and the time that saves have cost."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..callback import Context, Metrics, TrainerCallback
from ..state import TrainerControl, TrainerState
from .launches import LaunchFiles


@dataclass
class Heartbeat(TrainerCallback):
    """Writes the step about once a second, and a line beside every log."""

    files: LaunchFiles
    blocking_seconds: Callable[[], float] = lambda: 0.0  # that the loop has waited for saves
    _first_step: int = 0
    _since: float = 0.0

    def on_train_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The first step is about to be taken."""
        self._first_step, self._since = state.global_step, time.time()
        self._beat(state, is_due=True)

    def on_step_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """One more step."""
        self._beat(state)

    def on_prediction_step(
        self, args: Context, state: TrainerState, control: TrainerControl
    ) -> None:
        """An evaluation is a sign of life, too."""
        self._beat(state)

    def on_log(
        self, args: Context, state: TrainerState, control: TrainerControl, logs: Metrics
    ) -> None:
        """What ``metrics.jsonl`` lacks, as no resume can repeat it."""
        if "loss" in logs:
            self.files.log(
                step=state.global_step,
                peak_memory=peak_memory(),
                save_blocking_seconds=round(self.blocking_seconds(), 6),
            )

    def on_train_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The last step is taken."""
        self._beat(state, is_due=True)

    def _beat(self, state: TrainerState, *, is_due: bool = False) -> None:
        facts = {"first_step": self._first_step, "since": self._since}
        self.files.beat(state.global_step, state.max_steps, is_due=is_due, **facts)


def peak_memory() -> int:
    """Bytes of the GPU at most so far, or of this process if there is none."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
