"""Callbacks observe the loop and may set the flags of TrainerControl; they never change the loop
itself.

Events and argument order are those of the Hugging Face ``TrainerCallback``; the first argument,
``args``, is a ``Context`` with the run's parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .section import TrainSection
from .state import TrainerControl, TrainerState

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .learner import Learner

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Context:
    """The parts of a run that callbacks may read."""

    section: TrainSection
    model: nn.Module
    learner: Learner  # of the policy
    output_dir: Path
    num_examples: int | None  # None: not known as long as the data is being encoded
    steps_per_epoch: int | None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The current optimizer of the policy."""
        return self.learner.step.optimizer


class TrainerCallback:
    """Does nothing at every event; override the ones you need. A callback with ``state_dict`` and
    ``load_state_dict`` has a state, which is part of every checkpoint, under its class's name."""

    def on_init_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The trainer is built and, on a resume, its states are restored."""

    def on_train_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The loop starts."""

    def on_epoch_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Before the first step of an epoch."""

    def on_step_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Before an optimizer step."""

    def on_substep_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """After a micro-batch that is not the last of its step."""

    def on_pre_optimizer_step(
        self, args: Context, state: TrainerState, control: TrainerControl
    ) -> None:
        """Gradients are normalized and clipped; the optimizer comes next."""

    def on_optimizer_step(
        self, args: Context, state: TrainerState, control: TrainerControl
    ) -> None:
        """The optimizer has updated the weights; gradients still exist."""

    def on_step_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """An optimizer step is done and counted."""

    def on_epoch_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The last step of an epoch is done."""

    def on_log(
        self, args: Context, state: TrainerState, control: TrainerControl, logs: Metrics
    ) -> None:
        """The metrics since the last log, or of an evaluation."""

    def on_prediction_step(
        self, args: Context, state: TrainerState, control: TrainerControl
    ) -> None:
        """One batch of an evaluation has run."""

    def on_evaluate(
        self, args: Context, state: TrainerState, control: TrainerControl, metrics: Metrics
    ) -> None:
        """An evaluation is done; the best metric is up to date."""

    def on_predict(
        self, args: Context, state: TrainerState, control: TrainerControl, metrics: Metrics
    ) -> None:
        """``Trainer.predict`` is done."""

    def on_save(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The checkpoint of ``state.global_step`` is committed; the loop may be further by now."""

    def on_train_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The loop has ended, finished or stopped."""


@dataclass
class Callbacks:
    """All callbacks of a run, called in order."""

    args: Context
    state: TrainerState
    control: TrainerControl
    members: Sequence[TrainerCallback] = field(default_factory=list)

    def emit(self, event: str, **details: Metrics) -> None:
        """Call ``event`` of every callback."""
        for member in self.members:
            getattr(member, event)(self.args, self.state, self.control, **details)

    def state_dict(self) -> dict[str, object]:
        """The states of those that have one."""
        return {name: member.state_dict() for name, member in self._stateful().items()}  # type: ignore[attr-defined]

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore those that are in ``state``; a callback that is new in this run starts fresh."""
        for name, member in self._stateful().items():
            if name in state:
                member.load_state_dict(state[name])  # type: ignore[attr-defined]

    def _stateful(self) -> dict[str, TrainerCallback]:
        found: dict[str, TrainerCallback] = {}
        for member in self.members:
            if hasattr(member, "state_dict"):
                name, count = type(member).__name__, 2
                while name in found:
                    name, count = f"{type(member).__name__}-{count}", count + 1
                found[name] = member
        return found

    def emit_saved(self, step: int) -> None:
        """``on_save`` for the checkpoint of ``step``, which is committed now."""
        replace(self, state=replace(self.state, global_step=step)).emit("on_save")
