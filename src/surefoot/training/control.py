"""When a run logs, evaluates, saves and stops: triggers, early stopping, signals, the metrics that
go into a log, and the callbacks that every run has."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import TypeAlias

from rich.console import Console

from ..checkpoint.disk.commit import step_of
from ..checkpoint.saving.intervals import FIRST, FailureCosts, seconds_between_failures
from ..checkpoint.saving.saver import AsyncSaver
from ..checkpoint.section import CheckpointSection
from ..errors import STOP_SIGNALS, RecipeError, counted
from ..parallel.world import World
from ..schema import variant_name
from .arguments import Context
from .callback import Callbacks, Metrics, TrainerCallback, TrainerControl, TrainerState
from .callbacks._progress import Screen, WarmUp
from .callbacks._slow_ranks import SlowRanks
from .callbacks.metric_files import METRICS, PLOT, TENSORBOARD, Jsonl, Plot, TensorBoard
from .evaluation import is_better
from .section import CALLBACKS, TrainSection
from .step import StepMetrics

logger = logging.getLogger(__name__)
Minutes: TypeAlias = "float | Callable[[], float] | None"  # which may change from time to time


def standard_callbacks(
    section: TrainSection, saving: Trigger, *, is_compiled: bool, world: World
) -> list[TrainerCallback]:
    """The callbacks of the recipe, in the order in which they are called."""
    members: list[TrainerCallback] = [
        IntervalCallback(
            _trigger(section.log_steps, section.log_minutes, section.log_epoch, world),
            _trigger(section.eval_steps, section.eval_minutes, section.eval_epoch, world),
            saving,
        )
    ]
    if section.early_stopping_patience is not None:
        members.append(EarlyStop(section.early_stopping_patience, section.early_stopping_threshold))
    for callback in section.callbacks:
        if not isinstance(callback, TrainerCallback):
            name = variant_name(CALLBACKS, callback)
            raise RecipeError(f"train.callbacks: {name} is no surefoot.training.TrainerCallback")
        members.append(copy(callback))  # what a run changes is its own
    if world.size > 1:
        members.append(SlowRanks(world, section.folder))
    if not world.is_main:
        return members
    folder = section.folder
    screen = Screen(Console(markup=False, stderr=True))
    members += [Jsonl(folder / METRICS), screen, Plot(folder / PLOT)]
    if is_compiled:
        members.append(WarmUp())
    if "tensorboard" in section.report_to:
        members.append(TensorBoard(folder / TENSORBOARD))
    return members


@dataclass
class Trigger:
    """Due every ``steps`` steps, every ``minutes`` minutes, or at the end of an epoch."""

    steps: int | None = None
    minutes: Minutes = None
    epoch: bool = False
    clock: Callable[[], float] = time.monotonic
    since: float = field(init=False)

    def __post_init__(self) -> None:
        self.since = self.clock()

    def is_due(self, step: int) -> bool:
        """Whether it is due after ``step`` steps; the minutes then count from zero again."""
        minutes = self.minutes() if callable(self.minutes) else self.minutes
        if minutes is not None and self.clock() - self.since >= 60 * minutes:
            self.since = self.clock()
            return True
        return self.steps is not None and step % self.steps == 0


def _trigger(steps: int | None, minutes: Minutes, epoch: bool, world: World) -> Trigger:
    """One clock decides for all ranks: each does what any does, and no two clocks are alike, so
    that two of them would save, log or evaluate twice, at neighboring steps."""
    return Trigger(steps, minutes if world.is_main else None, epoch)


def save_trigger(section: CheckpointSection, saver: AsyncSaver, world: World) -> Trigger:
    """When a recipe saves."""
    given = section.save_minutes
    minutes: Minutes = partial(best_minutes, saver, world) if given == "auto" else given
    return _trigger(section.save_steps, minutes, section.save_epoch, world)


def best_minutes(saver: AsyncSaver, world: World) -> float:
    """Minutes between two saves by what they and a start have taken in this launch, so that the
    least time is lost to saves and failures."""
    if not saver.num_committed:
        return FIRST / 60
    costs = FailureCosts(
        stall=saver.blocking_seconds / saver.num_committed,
        save=saver.save_seconds,
        restart=world.progress.seconds.get("starting", 0.0),
    )
    return costs.best_interval(seconds_between_failures(world.num_nodes)) / 60


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


@dataclass
class EarlyStop(TrainerCallback):
    """Stops after ``patience`` evaluations in a row, none better by more than ``threshold``."""

    patience: int
    threshold: float = 0.0

    def _judged(self, args: Context, state: TrainerState) -> tuple[float | None, int]:
        """The best metric, and how many evaluations after it were no better. From the log, so that
        no other metric's, direction's or rows' best is left of an earlier launch."""
        best, num_worse = None, 0
        section = args.section
        for metric in state.evaluated(section.metric_for_best_model).values():
            if is_better(metric, best, greater=section.is_greater_better, by=self.threshold):
                best, num_worse = metric, 0
            else:
                num_worse += 1
        return best, num_worse

    def on_train_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """A run that had stopped already does not resume."""
        if self._judged(args, state)[1] >= self.patience:
            control.should_training_stop = True
            logger.info(
                "this run has stopped early, at step %d; to train longer, raise "
                "train.early_stopping_patience",
                state.global_step,
            )

    def on_evaluate(
        self, args: Context, state: TrainerState, control: TrainerControl, metrics: Metrics
    ) -> None:
        """Count evaluations without a better metric."""
        best, num_worse = self._judged(args, state)
        if num_worse >= self.patience:
            control.should_training_stop = control.should_save = True
            logger.info(
                "early stop at step %d: %s was no better than %.4g for %s",
                state.global_step,
                args.section.metric_for_best_model,
                math.nan if best is None else best,
                counted(num_worse, "evaluation"),
            )


INSISTENT = (signal.SIGTERM, signal.SIGINT)  # a second one of these exits immediately
_OUTPUTS = (1, 2)  # descriptors


def stop_signals() -> list[signal.Signals]:
    """The signals that stop a run: without those that are ignored, as SIGHUP is under nohup."""
    return [s for s in STOP_SIGNALS if s in INSISTENT or signal.getsignal(s) != signal.SIG_IGN]


class StopSignal:
    """A context in which a signal becomes a request, named ``received``. It may be nested."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._num_insistent = 0
        self._terminals: list[int] = []
        self._before: dict[signal.Signals, object] = {}
        self._depth = 0

    def __enter__(self) -> StopSignal:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not self._depth:  # elsewhere Python forbids handlers
            self._terminals = [number for number in _OUTPUTS if os.isatty(number)]
            self._before = {s: signal.signal(s, self._receive) for s in stop_signals()}
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._leave_closed_terminals()
        # A closed terminal may send SIGHUP twice, and SIGTERM may follow SIGUSR1: neither insists.
        # The kernel sends SIGXCPU each second.
        self._num_insistent += number in INSISTENT
        if self._num_insistent > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.received is None:
            self.received = signal.Signals(number)
            again = "it again" if number in INSISTENT else "SIGTERM twice"
            logger.warning(
                "%s received: finishing this step and saving; send %s to exit immediately",
                self.received.name,
                again,
            )

    def _leave_closed_terminals(self) -> None:
        """Write nowhere what went to a terminal that is gone: there it would be an error."""
        for number in self._terminals:
            if not os.isatty(number):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, number)
                os.close(nowhere)


@contextmanager
def saying_what_is_lost(callbacks: Callbacks, saver: AsyncSaver) -> Iterator[None]:
    """Run a loop in the block. Where it fails, raise what failed first, and log what that costs."""
    first_step, root = callbacks.state.global_step, saver.path_of
    try:
        yield
    except BaseException as error:
        first, step, writing = callbacks.error, callbacks.state.global_step, saver.in_flight
        if first not in (None, error):  # by which the step could not be saved, say
            logger.error("after that, another error: %s: %s", type(error).__name__, error)
        saved = first_step if saver.newest is None else step_of(saver.newest)
        if saved < step:
            logger.error(
                "%s since %s lost by this error%s; the same command resumes from there",
                counted(step - saved, "step"),
                f"{root(saved).name} are" if saved else "the start are",
                f", unless {writing.name} is still committed" if writing else "",
            )
        elif step > first_step:
            logger.info("step %d is saved; the same command resumes from it", step)
        if first is None or first is error:
            raise
        raise first from first.__cause__
    finally:
        callbacks.error, callbacks.is_deferring = None, False


@dataclass
class LogAccumulator:
    """Accumulates steps and converts them to one record."""

    state: TrainerState
    num_parameters: int  # for the estimate of total_flos
    seconds: float = 0.0  # speed is of this session only, so these two are not saved
    tokens: int = 0
    last: StepMetrics | None = None

    def spend(self, seconds: float) -> None:
        """Add training time."""
        self.seconds += seconds
        self.state.train_runtime += seconds

    def add(self, figures: StepMetrics) -> None:
        """Add one step."""
        state, tokens = self.state, figures.num_tokens
        self.tokens, self.last = self.tokens + tokens, figures
        state.num_input_tokens_seen += tokens
        state.total_flos += 6.0 * self.num_parameters * tokens
        if not figures.is_finite:
            return
        state.train_loss_total += figures.loss / figures.weight if figures.weight else 0.0
        state.interval_loss += figures.loss
        state.interval_weight += figures.weight
        for name, value in figures.metrics.items():
            state.interval_metrics[name] = state.interval_metrics.get(name, 0.0) + value

    def note(self, figures: Mapping[str, float]) -> None:
        """Add the metrics of a window, if there are any."""
        state = self.state
        state.interval_windows += bool(figures)
        for name, value in figures.items():
            state.interval_figures[name] = state.interval_figures.get(name, 0.0) + value

    def log(self, callbacks: Callbacks) -> None:
        """Report the steps since the last report, if there are any, and reset."""
        state = self.state
        if self.last is None:
            return
        weight, windows = state.interval_weight, state.interval_windows
        record: dict[str, float] = {
            "step": state.global_step,
            "epoch": state.epoch,
            "loss": state.interval_loss / weight if weight else float("nan"),
            "grad_norm": self.last.grad_norm,
            "learning_rate": self.last.learning_rate,
            **{name: value / weight for name, value in state.interval_metrics.items() if weight},
            **{name: value / windows for name, value in state.interval_figures.items()},
            "num_input_tokens_seen": state.num_input_tokens_seen,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
        }
        state.log_history.append(record)
        state.interval_loss = state.interval_weight = 0.0
        state.interval_metrics, state.interval_figures, state.interval_windows = {}, {}, 0
        self.seconds, self.tokens, self.last = 0.0, 0, None
        callbacks.emit("on_log", logs=record)
