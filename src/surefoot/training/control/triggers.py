"""Interval triggers: when to log, evaluate and save: by steps, minutes, or epochs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..callback import Context, TrainerCallback
from ..state import TrainerControl, TrainerState


@dataclass
class Trigger:
    """Due every ``steps`` steps, every ``minutes`` minutes, or at the end of an epoch."""

    steps: int | None = None
    minutes: float | None = None
    epoch: bool = False
    clock: Callable[[], float] = time.monotonic
    since: float = field(init=False)

    def __post_init__(self) -> None:
        self.since = self.clock()

    def is_due(self, step: int) -> bool:
        """Whether it is due after ``step`` steps; the minutes then count from zero again."""
        if self.minutes is not None and self.clock() - self.since >= 60 * self.minutes:
            self.since = self.clock()
            return True
        return self.steps is not None and step % self.steps == 0


@dataclass
class IntervalCallback(TrainerCallback):
    """Sets the flags of the loop when its triggers are due; at the last step, all in use."""

    log: Trigger
    evaluate: Trigger
    save: Trigger

    def on_step_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """By steps and minutes; and at the end of the run."""
        control.should_log |= self.log.is_due(state.global_step)
        control.should_evaluate |= self.evaluate.is_due(state.global_step)
        control.should_save |= self.save.is_due(state.global_step)
        if state.global_step >= state.max_steps:
            control.should_log = control.should_save = True
            trigger = self.evaluate
            is_used = trigger.steps is not None or trigger.minutes is not None or trigger.epoch
            control.should_evaluate |= is_used

    def on_epoch_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """By epoch."""
        control.should_log |= self.log.epoch
        control.should_evaluate |= self.evaluate.epoch
        control.should_save |= self.save.epoch
