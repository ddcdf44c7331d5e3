"""Windows of micro-batches in an order that is a pure function of (seed, epoch).

The data position is two integers, the epoch and the window in it. So a resume skips nothing, and
the examples of step k are the same for any number of ranks and any micro-batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

import numpy as np

from ...batch import IGNORE_INDEX, Batch, Features, Window
from ...errors import DataError
from ..data_order import Index, permutation
from ..store.dataset import EncodedDataset
from .length_balancing import assign_to_rank
from .prefetch import Prefetch

Collate = Callable[[Sequence[Features]], Batch]


@dataclass
class Loader:
    """Endless windows of one rank's micro-batches. Every example occurs once per epoch.

    The examples of a window are assigned to ranks and micro-batches by length. The last window of
    an epoch has the remaining examples. If these are fewer than the ranks, some ranks get a masked
    one.
    """

    dataset: EncodedDataset
    collate: Collate
    _: KW_ONLY
    global_batch_size: int
    micro_batch_size: int
    seed: int
    packing: bool = True  # how ``collate`` lays examples out
    shuffle: bool = True
    rank: int = 0
    world_size: int = 1
    prefetch: Prefetch | None = None  # makes the next window ahead
    epoch: int = field(default=0, init=False)  # of the next window
    window: int = field(default=0, init=False)  # the next one, counted from 0 in each epoch
    _order: tuple[int, Index] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not len(self.dataset):
            raise DataError("there are no examples to load")
        check_sizes(self.global_batch_size, self.micro_batch_size, self.world_size)

    @property
    def num_examples(self) -> int:
        """Examples in an epoch."""
        return len(self.dataset)

    @property
    def steps_per_epoch(self) -> int:
        """Windows in an epoch."""
        return -(-len(self.dataset) // self.global_batch_size)

    @property
    def progress(self) -> float:
        """Completed epochs, with a fraction."""
        return self.epoch + self.window / self.steps_per_epoch

    def __iter__(self) -> Iterator[Window]:
        while True:
            yield self.next_window()

    def next_window(self) -> Window:
        """This rank's micro-batches of the next optimizer step; advances the position."""
        at, ahead = (self.epoch, self.window), self.prefetch
        window = self.window_at(*at) if ahead is None else ahead.take(at, self.window_at)
        self.skip()
        if ahead is not None:
            ahead.begin((self.epoch, self.window), self.window_at)
        return window

    def window_at(self, epoch: int, window: int) -> Window:
        """This rank's micro-batches of any window."""
        return [batch_of(g, self.dataset, self.collate) for g in self.groups(epoch, window)]

    def skip(self) -> None:
        """Skip the next window."""
        self.window += 1
        if self.window == self.steps_per_epoch:
            self.epoch, self.window = self.epoch + 1, 0

    def groups(self, epoch: int, window: int) -> list[Index]:
        """The items of each of this rank's micro-batches in any window."""
        start = window * self.global_batch_size
        items = self.order(epoch)[start : start + self.global_batch_size]
        return assign_to_rank(
            items,
            self.dataset.lengths[items],
            micro_batch_size=self.micro_batch_size,
            rank=self.rank,
            world_size=self.world_size,
            packing=self.packing,
        )

    def order(self, epoch: int) -> Index:
        """All items in the order of an epoch."""
        if not self.shuffle:
            return np.arange(len(self.dataset))
        known = self._order  # of one moment: a thread may look ahead
        if known is None or known[0] != epoch:
            known = epoch, permutation(len(self.dataset), seed=self.seed, stream=epoch)
            self._order = known
        return known[1]

    def state_dict(self) -> dict[str, int | str | bool]:
        """The data position, and the settings on which it depends."""
        return {"epoch": self.epoch, "window": self.window, **self._identity()}

    def load_state_dict(self, state: dict[str, int | str | bool]) -> None:
        """Go to a saved position; raises DataError if it belongs to other data or another order."""
        check_same({"streaming": False, **state}, {"streaming": False, **self._identity()})
        self.epoch, self.window = int(state["epoch"]), int(state["window"])

    def _identity(self) -> dict[str, int | str | bool]:
        return {
            "length": len(self.dataset),
            "seed": self.seed,
            "global_batch_size": self.global_batch_size,
            "shuffle": self.shuffle,
            "dataset": self.dataset.fingerprint,
        }


@dataclass(frozen=True)
class InOrder:
    """One rank's micro-batches of an evaluation set, which can be iterated many times.

    They are the batches of one process, assigned to ranks in turn. If some ranks get one batch
    fewer, they get a masked one.
    """

    dataset: EncodedDataset
    collate: Collate
    _: KW_ONLY
    micro_batch_size: int
    rank: int = 0
    world_size: int = 1

    def __iter__(self) -> Iterator[Batch]:
        size = self.micro_batch_size
        for start in range(0, len(self.dataset), size * self.world_size):
            first = start + size * self.rank
            rows = range(first, min(first + size, len(self.dataset)))
            found = [self.dataset[i] for i in rows]
            yield self.collate(found or [_without_labels(self.dataset[0])])


class Items(Protocol):
    """A sequence of features, by number."""

    def __getitem__(self, item: int) -> Features: ...


def batch_of(group: Index, items: Items, collate: Collate) -> Batch:
    """The batch of a group. An empty group gives a masked example, because all ranks of a
    sharded model must run the same number of passes.
    """
    if len(group):
        return collate([items[int(item)] for item in group])
    return collate([_without_labels(items[0])])


def check_sizes(global_batch_size: int, micro_batch_size: int, world_size: int) -> None:
    """Raise ``DataError`` unless a window divides evenly over ranks and micro-batches."""
    if global_batch_size % (micro_batch_size * world_size):
        raise DataError(
            f"train.global_batch_size ({global_batch_size}) is not a multiple of "
            f"train.micro_batch_size x data-parallel ranks ({micro_batch_size} x {world_size} = "
            f"{micro_batch_size * world_size}); change one of them"
        )


def check_same(saved: Mapping[str, object], here: Mapping[str, object]) -> None:
    """Raise ``DataError`` if a saved position belongs to other data or another order."""
    for name, value in here.items():
        if saved.get(name) != value:
            raise DataError(
                f"cannot resume mid-epoch: {NAMES[name]} was {saved.get(name)} in the "
                f"checkpoint and is {value} now; use the recipe of that run, or start a new run "
                "from its weights (model.path)"
            )


def _without_labels(item: Features) -> Features:
    """The same example, fully masked."""
    return {**item, "labels": [IGNORE_INDEX] * len(item["labels"])}


NAMES = {
    "streaming": "data.streaming",
    "length": "the number of examples",
    "seed": "train.seed",
    "global_batch_size": "train.global_batch_size",
    "shuffle": "data.shuffle",
    "dataset": "the fingerprint of the encoded examples",
    "buffer_size": "data.buffer_size",
    "held": "the number of examples that data.val_size holds out",
    "content": "the fingerprint of the examples seen so far",
}
