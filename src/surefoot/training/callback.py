"""The progress of a run (``TrainerState``), and callbacks, which observe the loop and may set the
flags of ``TrainerControl``; they never change the loop itself.

Names, events and their arguments are those of the Hugging Face Trainer, so that
``trainer_state.json`` has the same form; but the first argument of an event, ``args``, is a
``Context`` with the run's parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any

from ..optim.plateau import Reductions
from ..parallel.progress import CALLBACKS, Progress
from .section import TrainSection

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .step import Learner


Record = dict[str, float]
_OURS = {"is_ours": True}  # fields that the Hugging Face Trainer does not know


@dataclass
class Kernels:
    """Choices between kernels that round differently, made once, at the start of a run."""

    packed_attention: str | None = None  # the kernel of packed rows; None: not chosen by the run
    shared_prompts: bool | None = None  # whether a packed row has a shared prompt once
    prepared: dict[str, str] | None = None  # how the model was made ready; None: not recorded

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Read ``kernels`` of a saved TrainerState. What it does not have was not chosen."""
        kernels = state.get("kernels")
        saved = kernels if isinstance(kernels, Mapping) else {}
        for choice in fields(self):
            setattr(self, choice.name, saved.get(choice.name))


@dataclass
class FittedSizes:
    """Batch sizes that were lowered because memory did not suffice, or chosen so that it does."""

    # first step, examples per micro-batch from there on, train.micro_batch_size at that time
    micro_batch_size: list[tuple[int, int, int]] = field(default_factory=list)
    forward: int | None = None  # examples of a forward pass without gradients
    generate: int | None = None  # generate.batch_size

    @property
    def num_changes(self) -> int:
        """How many sizes were lowered."""
        return len(self.micro_batch_size) + sum(
            x is not None for x in (self.forward, self.generate)
        )

    def state_dict(self) -> dict[str, object]:
        """All fields as plain data."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``; from older checkpoints, which lack it, nothing."""
        changes = state.get("micro_batch_size", ())
        self.micro_batch_size = [(first, size, recipe) for first, size, recipe in changes]
        self.forward, self.generate = state.get("forward"), state.get("generate")


@dataclass
class PolicyVersion:
    """How many optimizer steps the weights of a policy have behind them."""

    state: TrainerState | None = None  # None: it is not trained

    @property
    def step(self) -> int | None:
        """Their number, if it is known."""
        return None if self.state is None else self.state.global_step


@dataclass
class TrainerState:
    """Progress of a run. Everything here is saved, so every value is correct after a resume."""

    epoch: float = 0.0
    global_step: int = 0
    max_steps: int = 0
    num_train_epochs: float = 0.0
    train_batch_size: int = 0  # micro_batch_size
    num_input_tokens_seen: int = 0
    total_flos: float = 0.0  # estimate: 6 x parameters x tokens
    log_history: list[Record] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    # Sum of step losses, for the mean over the whole run.
    train_loss_total: float = field(default=0.0, metadata=_OURS)
    train_runtime: float = field(default=0.0, metadata=_OURS)  # seconds of training, all launches
    interval_loss: float = field(default=0.0, metadata=_OURS)  # sums since the last log
    interval_weight: float = field(default=0.0, metadata=_OURS)
    interval_metrics: dict[str, float] = field(default_factory=dict, metadata=_OURS)
    # Of windows as a whole.
    interval_figures: dict[str, float] = field(default_factory=dict, metadata=_OURS)
    interval_windows: int = field(default=0, metadata=_OURS)
    # (epoch, index) of windows that were left out.
    skipped_windows: list[tuple[int, int]] = field(default_factory=list, metadata=_OURS)
    # Steps without an update: a loss or gradient was not a number.
    num_skipped_steps: int = field(default=0, metadata=_OURS)
    kernels: Kernels = field(default_factory=Kernels, metadata=_OURS)
    fitted: FittedSizes = field(default_factory=FittedSizes, metadata=_OURS)
    pending: list[str] = field(default_factory=list, metadata=_OURS)  # flags a stop left raised
    # What evaluations have left of the learning rate.
    reductions: Reductions = field(default_factory=Reductions, metadata=_OURS)

    @property
    def num_skipped(self) -> int:
        """Steps and batches that were skipped because a loss or gradient was NaN or infinite."""
        return self.num_skipped_steps + len(self.skipped_windows)

    @property
    def is_complete(self) -> bool:
        """Whether all steps are taken, and what belongs to the last one is done."""
        return self.global_step >= self.max_steps and not self.pending

    def state_dict(self) -> dict[str, object]:
        """All fields as plain data."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore ``state``, but keep the length of this run and the rank of this process."""
        not_restored = {"max_steps", "num_train_epochs", "train_batch_size"}
        not_restored |= {"kernels", "fitted", "reductions"}  # as objects that others have, too
        # Rank 0 has saved its own.
        not_restored |= {"is_local_process_zero", "is_world_process_zero"}
        for attribute in fields(self):
            if attribute.name in state and attribute.name not in not_restored:
                setattr(self, attribute.name, state[attribute.name])
        self.skipped_windows = [(epoch, index) for epoch, index in self.skipped_windows]
        self.kernels.load_state_dict(state)
        for name in ("fitted", "reductions"):
            saved = state.get(name)
            getattr(self, name).load_state_dict(saved if isinstance(saved, Mapping) else {})

    def for_people(
        self, steps: tuple[int | None, int | None, int | None], best: str | None
    ) -> dict[str, object]:
        """The content of ``trainer_state.json``: only the fields of the Hugging Face Trainer.
        ``best`` is the path of the best checkpoint, ``steps`` are the recipe's ``log_steps``,
        ``eval_steps`` and ``save_steps``."""
        names = [attribute.name for attribute in fields(self) if attribute.metadata != _OURS]
        values = asdict(self)
        return {name: values[name] for name in names} | {
            "best_model_checkpoint": best,
            "logging_steps": steps[0] or 0,
            "eval_steps": steps[1] or 0,
            "save_steps": steps[2] or 0,
            "is_hyper_param_search": False,
            "trial_name": None,
            "trial_params": None,
            "stateful_callbacks": {},
        }


@dataclass
class TrainerControl:
    """Flags that callbacks set and the loop resets after acting. With several ranks, each acts on
    the flags that any rank has set."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False
    # Stop as at this signal: finish the step, save, and say by which signal. Handlers are the main
    # thread's, and a notebook, a service or a worker of Ray may train in another one.
    stop_signal: Signals | None = None


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
    progress: Progress = field(default_factory=Progress)

    def emit(self, event: str, **details: Metrics) -> None:
        """Call ``event`` of every callback."""
        with self.progress.during(CALLBACKS):
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
        by_name: dict[str, TrainerCallback] = {}
        for member in self.members:
            if hasattr(member, "state_dict"):
                name, count = type(member).__name__, 2
                while name in by_name:
                    name, count = f"{type(member).__name__}-{count}", count + 1
                by_name[name] = member
        return by_name

    def emit_saved(self, step: int) -> None:
        """``on_save`` for the checkpoint of ``step``, which is committed now."""
        replace(self, state=replace(self.state, global_step=step)).emit("on_save")
