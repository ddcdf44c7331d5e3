"""What each optimizer step trains on: windows as they were loaded, or prepared by the stage.

A prepared window may be several optimizer steps. The next one is given by a number, and the
examples of each are a pure function of it, so a run can be resumed inside a window.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from ..batch import Features, Window
from ..data.data_order import Index, permutation
from ..data.order.loader import Loader, Omitted, WindowExamples
from ..data.order.micro_batches import Batching
from ..data.store.cache import num_tokens
from ..errors import RecipeError, RunError, counted
from ..model.numerics import derive
from ..optim.optimizer import Optimizer
from ..parallel.world import ALONE, World
from ..schema import Unset
from .out_of_memory import MemoryGuard
from .section import TrainSection
from .stage import Stage, StageContext

Place = tuple[int, int]  # of a window: epoch, and index in it
MOST_RATE = 0.1  # of any optimizer here
MAX_EMPTY = 100  # windows in a row without anything to train on, where an epoch has no length


class Columns(Protocol):
    """Precomputed columns for the windows of a set."""

    def added(self, place: Place, examples: Sequence[Features]) -> Sequence[Features]:
        """The examples of the window at ``place``, with their columns."""


@dataclass
class WindowState:
    """The window that is trained on, equal on all ranks of any mesh. Empty between windows."""

    place: Place = (0, 0)
    examples: Sequence[Features] = ()
    done: int = 0  # optimizer steps

    def state_dict(self) -> dict[str, Any]:
        """Place, count and columns; nothing between two windows."""
        if not self.examples:
            return {}
        return {"place": list(self.place), "done": self.done, "columns": columns(self.examples)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``."""
        self.clear()
        if state:
            epoch, index = state["place"]
            self.place, self.done = (epoch, index), state["done"]
            self.examples = examples_of(state["columns"])

    def clear(self) -> None:
        """No window is being trained on."""
        self.place, self.examples, self.done = (0, 0), (), 0


@dataclass
class StageState:
    """What the stage keeps from each window for the next, equal on all ranks of any mesh."""

    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepInput:
    """What one optimizer step trains on."""

    place: Place
    window: Window  # of this rank; empty if the stage found nothing in it to train on
    figures: Mapping[str, float] = field(default_factory=dict)  # of a window that begins here
    seconds: float = 0.0  # that preparing it took
    rows: Sequence[float] | None = None  # ``Prepared.rows`` of a window that begins here


@dataclass(frozen=True)
class _Turn:
    """What a turn began with."""

    place: Place  # of the next window
    loaded: Sequence[Features] | None  # its examples, if the turn began it
    inside: WindowState  # before the turn
    stage_values: Mapping[str, float]  # what the stage keeps, before the turn


@dataclass(frozen=True)
class _StepGroups:
    """The examples of this rank's micro-batches of one step."""

    examples: Sequence[Features]
    batching: Batching
    lengths: Index
    groups: Sequence[Index]


def steps_per_epoch(loader: Loader, stage: Stage) -> int | None:
    """Optimizer steps in an epoch, if that is known."""
    count = loader.steps_per_epoch
    return None if count is None else count * stage.passes * stage.mini_batches


@dataclass
class Windows:
    """The turns of a run, in order. Its state is the data position, that inside a window, and what
    the stage keeps from window to window."""

    loader: Loader
    stage: Stage
    context: Callable[[Place], StageContext]
    kept: Columns
    seed: int
    memory: MemoryGuard
    inside: WindowState = field(default_factory=WindowState)
    stage_state: StageState = field(default_factory=StageState)  # which ``context`` reads
    world: World = ALONE
    omitted: Omitted | None = None  # of steps that are computed again, to see what it did
    _num_empty: int = field(default=0, init=False)  # windows in a row
    _turn: _Turn | None = field(default=None, init=False)  # the last one
    _step_examples: Sequence[Features] = field(default=(), init=False)  # what it trains on
    _groups: _StepGroups | None = field(default=None, init=False)  # of these

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in an epoch, if that is known."""
        return steps_per_epoch(self.loader, self.stage)

    @property
    def step_examples(self) -> Sequence[Features]:
        """What the last turn trains on: all examples of its optimizer step."""
        return self._step_examples

    @property
    def step_rows(self) -> WindowExamples | None:
        """The rows that these are, one for each; None: the stage made others of its rows."""
        turn = self._turn
        return self.loader.examples_at(*turn.place) if turn and self._is_by_row else None

    @property
    def _is_by_row(self) -> bool:
        """Whether the examples of this turn are one for each row that was loaded, in its order."""
        loaded = () if self._turn is None else self._turn.loaded or ()
        return len(loaded) == len(self._step_examples)

    @property
    def is_between(self) -> bool:
        """Whether the next turn begins a window."""
        return not self.inside.examples

    def leave_out(self, places: Sequence[Place]) -> None:
        """Skip the rest of these windows, if one of them comes next."""
        if not self.is_between and self.inside.place in places:
            self.inside.clear()
        while self.is_between and (self.loader.epoch, self.loader.window) in places:
            self.loader.skip()

    def next_turn(self) -> StepInput:
        """What the next optimizer step trains on; advances the position. Raises ``RunError`` if
        there was nothing to train on for many windows."""
        place = self.loader.epoch, self.loader.window
        self._turn = _Turn(place, None, replace(self.inside), self.stage_state.values)
        self.loader.resize(self.memory.micro_batch_size)  # before a window is built ahead
        if self.is_between:
            with self.world.together():
                loaded = self.kept.added(place, self.loader.next_examples())
            self._turn = replace(self._turn, loaded=loaded)
        step = self.repeat_turn()
        self._num_empty = 0 if len(self._step_examples) else self._num_empty + 1
        if self._num_empty > (self.loader.steps_per_epoch or MAX_EMPTY):
            summary = ", ".join(f"{name} {value:.4g}" for name, value in step.figures.items())
            with self.world.together():  # all of them
                raise RunError(
                    f"there was nothing to train on in {self._num_empty} windows in a row (in the "
                    f"last one: {summary}); make the reward distinguish responses, or train with "
                    "sft first"
                )
        return step

    def repeat_turn(self) -> StepInput:
        """The same turn again, with the micro-batch size of now; a window that began with
        it is prepared again."""
        assert self._turn is not None
        turn, figures, seconds, rows = self._turn, dict[str, float](), 0.0, None
        self.loader.resize(self.memory.micro_batch_size)
        # Back to before the turn: PPO's moments, for one, must not count the same scores twice.
        self.inside, self.stage_state.values = replace(turn.inside), turn.stage_values
        inside = self.inside
        if turn.loaded is not None:
            started = time.monotonic()
            prepared = self.stage.prepare(self.context(turn.place), turn.loaded)
            seconds, figures = time.monotonic() - started, dict(prepared.figures)
            rows = prepared.rows
            inside.place, inside.examples = turn.place, prepared.examples
            self.stage_state.values = dict(prepared.state)
        place, examples = inside.place if inside.examples else turn.place, inside.examples
        seed = derive(self.seed, *inside.place)
        steps = inner_steps(len(examples), self.stage.passes, self.stage.mini_batches, seed)
        # The only step of a window gets the very object that was loaded: ``rows_of`` reads the
        # origins of rows from it, which a list of its examples would not have.
        is_whole = len(steps) <= 1
        self._step_examples = examples if is_whole else [examples[i] for i in steps[inside.done]]
        if self.omitted is not None:
            self._step_examples = self.without(self.omitted)
        inside.done += 1
        if inside.done >= len(steps):
            inside.clear()
        window: Window = ()
        if len(self._step_examples):
            with self.world.together():
                window = self.loader.deal(self._step_examples)
        return StepInput(place, window, figures, seconds, rows)

    def without(self, omitted: Omitted) -> Sequence[Features]:
        """``step_examples``, with what stands in the place of what is omitted; these themselves,
        if nothing of them is, or they are not one for each row."""
        rows, examples = self.step_rows, self._step_examples
        if rows is None or omitted.items.isdisjoint(rows.items.tolist()):
            return examples
        if isinstance(examples, WindowExamples):
            return replace(examples, omitted=omitted)
        pairs = zip(rows.items.tolist(), examples, strict=True)
        return [omitted.without(x) if item in omitted.items else x for item, x in pairs]

    def undo_turn(self) -> None:
        """Be where the last turn began: its step is not taken."""
        if (turn := self._turn) is not None:
            self.loader.epoch, self.loader.window = turn.place
            self.inside, self.stage_state.values = replace(turn.inside), turn.stage_values

    def heaviest(self) -> Window:
        """The window with the largest micro-batch, prepared like a turn; nothing advances."""
        self.loader.resize(self.memory.micro_batch_size)
        place = self.loader.heaviest()
        loaded = self.kept.added(place, self.loader.examples_at(*place))
        examples = self._step_examples = self.stage.prepare(self.context(place), loaded).examples
        return self.loader.deal(examples) if len(examples) else ()

    def rows_of(self, index: int) -> str:
        """The examples of a micro-batch of this turn, for messages: their rows and lengths."""
        examples, step = self._step_examples, self._step_groups()

        def row(position: int) -> str:
            if not isinstance(examples, WindowExamples):
                return f"example {position + 1} of the window"
            return examples.source.origin(int(examples.items[position]))

        group = step.groups[index] if index < len(step.groups) else np.arange(0)
        return ", ".join(f"{row(i)} with {counted(int(step.lengths[i]), 'token')}" for i in group)

    def num_rows_before(self, place: Place) -> int:
        """How many rows the run trains on before the window at ``place``, if it skips none."""
        epoch, window = place
        return epoch * (self.loader.num_examples or 0) + window * self.loader.global_batch_size

    def row_groups(self) -> Sequence[Index]:
        """For each of this rank's micro-batches of this turn, the places of its examples among the
        rows of the window; none if the examples are not one for each of these rows."""
        return self._step_groups().groups if self._is_by_row else ()

    def _step_groups(self) -> _StepGroups:
        """The micro-batches of this turn; they are those of the last call, while it lasts."""
        examples, batching = self._step_examples, self.loader.batching
        step = self._groups
        if step is None or step.examples is not examples or step.batching is not batching:
            if isinstance(examples, WindowExamples):
                lengths = examples.lengths
                groups = batching.groups(lengths)
            else:
                lengths = np.array([num_tokens(example) for example in examples], np.int64)
                groups = batching.groups(lengths, examples)
            step = self._groups = _StepGroups(examples, batching, lengths, groups)
        return step

    def state_dict(self) -> dict[str, Any]:
        """The data position, the position inside a window if there is one, and what the stage
        keeps if there is any."""
        state: dict[str, Any] = dict(self.loader.state_dict())
        additions = {"inside": self.inside.state_dict(), "stage": dict(self.stage_state.values)}
        return {**state, **{name: value for name, value in additions.items() if value}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; raises DataError if it belongs to other data or another order."""
        rest = {name: v for name, v in state.items() if name not in ("inside", "stage")}
        self.loader.load_state_dict(rest)
        self.inside.load_state_dict(state.get("inside", {}))
        self.stage_state.values = dict(state.get("stage", {}))


def num_steps(section: TrainSection, steps_per_epoch: int | None) -> int:
    """Optimizer steps of the whole run. Raises ``RecipeError`` if the number is unknown."""
    if section.max_steps is not None:
        return section.max_steps
    if steps_per_epoch is None:
        raise RecipeError(
            "train.max_steps: needed with data.streaming, as the length of an epoch is not known "
            "before all of the data is encoded; set it, or run `surefoot encode` first"
        )
    return math.ceil(section.num_epochs * steps_per_epoch)


def remarks(
    train: TrainSection, optim: Optimizer, num_examples: int | None, num_steps: int | None
) -> Iterator[str]:
    """What of a batch, a warmup and a rate the data or the run cannot use, and what to do; None:
    not known yet."""
    size, rate, warmup = train.global_batch_size, optim.learning_rate, optim.warmup_steps or 0
    is_set = not isinstance(size, Unset)
    if num_examples is not None and size > num_examples and is_set:
        yield (
            f"train.global_batch_size: {size:,} is more than there is to train on, so each step "
            f"has all {counted(num_examples, 'example')}; set {num_examples} or less"
        )
    if num_steps is not None and warmup > num_steps:
        yield (
            f"optim: warmup_steps {warmup:,} is more than the {counted(num_steps, 'step')} of the "
            f"run, so learning_rate {rate:g} is never reached; set less, or raise train.max_steps"
        )
    every, patience = train.eval_steps, train.early_stopping_patience
    if num_steps is not None and patience and every and patience >= num_steps // every:
        yield (
            f"train.early_stopping_patience: {patience} evaluations without a better metric are "
            f"not among the {num_steps // every} of the run, so nothing stops it; set less"
        )
    if rate > MOST_RATE:
        yield (
            f"optim: learning_rate {rate:g} is far above usual ones, 1e-6 to 0.05: a model "
            "forgets what it knows in a few steps; set a smaller one"
        )


def windows_of_run(loader: Loader, section: TrainSection, stage: Stage) -> dict[Place, Index]:
    """The items of every window of a run of known length, in order."""
    per_epoch, per_window = loader.steps_per_epoch, stage.passes * stage.mini_batches
    assert per_epoch is not None
    count = -(-num_steps(section, per_epoch * per_window) // per_window)
    places = [divmod(number, per_epoch) for number in range(count)]
    return {place: loader.examples_at(*place).items for place in places}


def inner_steps(count: int, passes: int, mini_batches: int, seed: int) -> list[Index]:
    """The examples of each optimizer step of a window of ``count``: all in order, if it is one
    step; else in each pass ``mini_batches`` parts of another permutation."""
    if passes == mini_batches == 1:
        return [np.arange(count)]
    orders = [permutation(count, seed=seed, stream=number) for number in range(passes)]
    parts = [part for order in orders for part in np.array_split(order, mini_batches)]
    return [np.sort(part) for part in parts if len(part)]


def columns(examples: Sequence[Features]) -> dict[str, dict[str, torch.Tensor]]:
    """Every column of examples as one tensor, and the lengths of its lists."""
    by_name = {}
    for name in examples[0]:
        arrays = [np.asarray(item[name]) for item in examples]
        lengths = torch.tensor([len(values) for values in arrays])
        by_name[name] = {"values": torch.from_numpy(np.concatenate(arrays)), "lengths": lengths}
    return by_name


def examples_of(by_name: Mapping[str, Mapping[str, torch.Tensor]]) -> list[Features]:
    """The examples that ``columns`` was made of."""
    parts = {
        name: [part.numpy() for part in torch.split(column["values"], column["lengths"].tolist())]
        for name, column in by_name.items()
    }
    count = len(next(iter(parts.values())))
    return [{name: column[i] for name, column in parts.items()} for i in range(count)]  # type: ignore[misc]
