"""The progress of a run (``TrainerState``), and callbacks, which observe the loop and may set the
flags of ``TrainerControl``; they never change the loop itself.

Names, events and their arguments are those of the Hugging Face Trainer, so that
``trainer_state.json`` has the same form; the first argument of an event, ``args``, is a ``Context``
with the run's parts (``arguments``).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from signal import Signals
from typing import Any, Protocol, runtime_checkable

from ..checkpoint.disk.folder import metrics_in
from ..errors import RecipeError, RunError
from ..optim.plateau import Reductions
from ..parallel.progress import CALLBACKS, Progress
from .arguments import Context

logger = logging.getLogger(__name__)
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
class Judgement:
    """By what evaluations were compared: ``best_metric`` and its like are of nothing else."""

    metric: str | None = None  # None: not recorded
    greater: bool | None = None
    rows: str | None = None  # hash of the rows, and of what measures them beside the weights
    since: int = -1  # evaluations up to this step were of other rows

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``; from older checkpoints, which lack it, nothing."""
        for attribute in fields(self):
            setattr(self, attribute.name, state.get(attribute.name, attribute.default))


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
    # What was read beside recipe, weights and rows: hashes by a name for people.
    read: dict[str, str] = field(default_factory=dict, metadata=_OURS)
    judgement: Judgement = field(default_factory=Judgement, metadata=_OURS)
    # What a program or a callback has set as ``args.NAME``.
    added: dict[str, Any] = field(default_factory=dict, metadata=_OURS)
    pending: list[str] = field(default_factory=list, metadata=_OURS)  # flags a stop left raised
    # What evaluations have left of the learning rate.
    reductions: Reductions = field(default_factory=Reductions, metadata=_OURS)

    @property
    def is_hyper_param_search(self) -> bool:
        """False: each trial of a sweep is a run of its own."""
        return False

    def evaluated(self, metric: str) -> dict[int, float]:
        """``metric`` of the evaluations on the rows of now, by step."""
        values = metrics_in(self.log_history, metric)
        return {step: value for step, value in values.items() if step > self.judgement.since}

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
        # These objects are others', too.
        not_restored |= {"kernels", "fitted", "reductions", "judgement", "added"}
        # Rank 0 has saved its own.
        not_restored |= {"is_local_process_zero", "is_world_process_zero"}
        for attribute in fields(self):
            if attribute.name in state and attribute.name not in not_restored:
                setattr(self, attribute.name, state[attribute.name])
        self.skipped_windows = [(epoch, index) for epoch, index in self.skipped_windows]
        self.kernels.load_state_dict(state)
        for name in ("fitted", "reductions", "judgement"):
            saved = state.get(name)
            getattr(self, name).load_state_dict(saved if isinstance(saved, Mapping) else {})
        self.added.clear()
        self.added.update(added if isinstance(added := state.get("added"), Mapping) else {})

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


_FLAGS = tuple(each.name for each in fields(TrainerControl) if each.name != "stop_signal")
Metrics = Mapping[str, float]


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


EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))
# What an event is given beside its three arguments, if its method takes it, as the Hugging Face
# Trainer's are.
_PARTS = (
    "model",
    "processing_class",
    "tokenizer",
    "optimizer",
    "lr_scheduler",
    "train_dataloader",
    "eval_dataloader",
)
_EVENT = ("args", "state", "control")  # what every event is called with
_DETAILS = {"on_log": ("logs",), "on_evaluate": ("metrics",), "on_predict": ("metrics",)}


@runtime_checkable
class _WithState(Protocol):
    """A callback with a state."""

    def state_dict(self) -> Mapping[str, object]: ...

    def load_state_dict(self, state: Any) -> None: ...


@dataclass(frozen=True)
class _Exported:
    """The state of a callback with transformers' ``ExportableState``. What it was made with is that
    of this launch; the attributes beside it are restored."""

    member: Any

    def state_dict(self) -> dict[str, object]:
        return dict(self.member.state()["attributes"])

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        for name, value in state.items():
            setattr(self.member, name, value)


def _with_state(member: object) -> _WithState | None:
    if isinstance(member, _WithState):
        return member
    is_exported = all(callable(getattr(member, name, None)) for name in ("state", "from_state"))
    return _Exported(member) if is_exported else None


def check_call(where: str, function: object, *positional: str, **named: object) -> None:
    """Raise ``RecipeError``: a program has given for ``where`` what cannot be called with these
    arguments."""
    if not callable(function):
        raise RecipeError(f"{where}: expected a function, got {_described(function)}")
    form = ", ".join([*positional, *(f"{name}=..." for name in named)])
    try:
        inspect.signature(function).bind(*positional, **named)
    except ValueError:  # built in, and so without a signature
        return
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise RecipeError(
            f"{where}: it is called with ({form}), and {name}{inspect.signature(function)} cannot "
            f"be: {error}"
        ) from None


def _described(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"


def all_made(callbacks: object) -> list[object]:
    """The objects of a list, or of one callback, as ``made`` has them; none of None."""
    members = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    return [] if callbacks is None else [made(each) for each in members]


def made(callback: object) -> object:
    """``callback``, or an object of it if it is a class. Raises ``RecipeError`` if it is none, or
    has a method that cannot be called at its event."""
    if isinstance(callback, type):
        try:
            inspect.signature(callback).bind()
        except TypeError as error:
            raise RecipeError(
                f"callbacks: {callback.__name__} is a class that cannot be called without "
                f"arguments ({error}); give an object of it"
            ) from None
        callback = callback()
    if not any(callable(getattr(callback, event, None)) for event in EVENTS):
        raise RecipeError(
            f"callbacks: {type(callback).__name__} has no method of an event; expected one of "
            f"{', '.join(EVENTS)}"
        )
    for event in EVENTS:
        _Listener.of(callback, event)
    return callback


def chosen(members: Iterable[object], callback: object) -> object | None:
    """The first of ``members`` that is ``callback``, or of this class; None if there is none."""
    if isinstance(callback, type):
        return next((each for each in members if isinstance(each, callback)), None)
    return next((each for each in members if each is callback), None)


@dataclass(frozen=True)
class _Listener:
    """One method of a callback, and which keyword arguments it takes: looked up once."""

    method: Callable[..., object]
    parts: tuple[str, ...]
    details: tuple[str, ...]
    is_theirs: bool  # not of our base class

    @classmethod
    def of(cls, member: object, event: str) -> _Listener | None:
        """None: the callback has nothing to do at it."""
        method = getattr(member, event, None)
        function = getattr(method, "__func__", None)
        if not callable(method) or function is getattr(TrainerCallback, event):
            return None
        parameters = inspect.signature(method).parameters.values()
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        names = {each.name for each in parameters if each.kind is not each.POSITIONAL_ONLY}

        def taken(available: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name for name in available if takes_all or name in names)

        listener = cls(
            method,
            taken(_PARTS),
            taken(_DETAILS.get(event, ())),
            not isinstance(member, TrainerCallback),
        )
        given = dict.fromkeys((*listener.parts, *listener.details))
        check_call(f"callbacks: {type(member).__name__}.{event}", method, *_EVENT, **given)
        return listener


class Callbacks:
    """All callbacks of a run, called in order."""

    def __init__(
        self,
        args: Context,
        state: TrainerState,
        control: TrainerControl,
        members: Iterable[object] = (),
        progress: Progress | None = None,
    ) -> None:
        self.args, self.state, self.control = args, state, control
        self.progress = progress or Progress()
        # Of the loop: while it can, it finishes and saves its step before an error ends the run.
        self.is_deferring = False
        self.error: BaseException | None = None
        self._set_members(made(member) for member in members)

    @property
    def members(self) -> tuple[object, ...]:
        """Those that are called; which methods they have is looked up when they come in."""
        return self._members

    def add(self, callback: object) -> None:
        """Call ``callback``, an object or a class, after the others."""
        self._set_members((*self.members, made(callback)))

    def pop(self, callback: object) -> object | None:
        """No longer call ``callback``, or the first object of this class; returns it, None if there
        is none."""
        member = chosen(self.members, callback)
        self._set_members(each for each in self.members if each is not member)
        return member

    def _set_members(self, members: Iterable[object]) -> None:
        self._members = tuple(members)
        listeners = {event: [_Listener.of(m, event) for m in self._members] for event in EVENTS}
        self._listeners = {
            event: [each for each in found if each is not None]
            for event, found in listeners.items()
        }

    def emit_evaluated(self, metrics: Metrics, best: float | None) -> None:
        """``on_evaluate``. Callbacks that are written for the Hugging Face Trainer compare with
        ``best``, the best metric before this evaluation, as it is updated after the event there."""
        self.emit("on_evaluate", theirs=replace(self.state, best_metric=best), metrics=metrics)

    def emit(
        self,
        event: str,
        *,
        state: TrainerState | None = None,
        theirs: TrainerState | None = None,
        **details: Metrics,
    ) -> None:
        """Call ``event`` of every callback; ``state`` in place of the run's, if it is given, and
        ``theirs`` for those without the base class above."""
        with self.progress.during(CALLBACKS):
            for listener in self._listeners[event]:
                seen = (theirs if listener.is_theirs else None) or state or self.state
                try:
                    self._call(listener, seen, details)
                except (Exception, SystemExit) as error:  # whatever it is, the others' states are
                    if not self.defers(error):  # to be those of the same event
                        raise

    def defers(self, error: BaseException) -> bool:
        """Keep ``error`` for the end of the step; False: raise it now. After the first, others are
        only logged."""
        if self.is_deferring and self.error is None:
            self.error = error
        elif self.is_deferring and error is not self.error:
            logger.error("another error: %s: %s", type(error).__name__, error)
        return self.is_deferring

    def _call(
        self, listener: _Listener, seen: TrainerState, details: Mapping[str, Metrics]
    ) -> None:
        """Call one method with what it takes, and obey what it returns."""
        given = {name: getattr(self.args, name) for name in listener.parts}
        given |= {name: details[name] for name in listener.details}
        rates = self.args.lr_scheduler.get_last_lr() if "optimizer" in given else ()
        returned = listener.method(self.args, seen, self.control, **given)
        if rates and self.args.lr_scheduler.get_last_lr() != rates:
            # Before the first update it would be taken for the peak of the schedule.
            raise RunError(
                f"callbacks: {listener.method.__qualname__} sets a learning rate of the "
                "optimizer; it is a function of the step: set optim.NAME.schedule"
            )
        if returned is not None and returned is not self.control:
            self._obey(returned, listener.method)

    def _obey(self, returned: object, method: Callable[..., object]) -> None:
        """Set the flags that an event has returned in a control of its own."""
        missing = [flag for flag in _FLAGS if not hasattr(returned, flag)]
        if missing:
            raise RunError(
                f"callbacks: {method.__qualname__} returned a {type(returned).__name__}; expected "
                "its control or nothing"
            )
        for flag in _FLAGS:
            setattr(self.control, flag, bool(getattr(returned, flag)))

    def state_dict(self) -> dict[str, object]:
        """The states of those that have one."""
        return {name: member.state_dict() for name, member in self._stateful().items()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore those that are in ``state``; a callback that is new in this run starts fresh."""
        for name, member in self._stateful().items():
            if name in state:
                member.load_state_dict(state[name])

    def _stateful(self) -> dict[str, _WithState]:
        by_name: dict[str, _WithState] = {}
        for member in self.members:
            if (stateful := _with_state(member)) is not None:
                name, count = type(member).__name__, 2
                while name in by_name:
                    name, count = f"{type(member).__name__}-{count}", count + 1
                by_name[name] = stateful
        return by_name

    def emit_saved(self, step: int) -> None:
        """``on_save`` for the checkpoint of ``step``, which is committed now."""
        self.emit("on_save", state=replace(self.state, global_step=step))
