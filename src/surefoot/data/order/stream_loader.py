"""Windows of micro-batches from data that is still being encoded, with a block shuffle.

As with data of known length, the data position is the epoch and the window in it. The examples of a
step are the same for any number of ranks, any micro-batch size and any progress of encoding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from ...batch import Window
from ...errors import DataError
from ..data_order import Index
from ..store.stream import Stream
from .block_shuffle import BlockShuffle
from .length_balancing import assign_to_rank
from .loader import Collate, batch_of, check_same, check_sizes
from .prefetch import Prefetch

logger = logging.getLogger(__name__)


def _nothing() -> Index:
    return np.empty(0, np.int64)


@dataclass
class StreamLoader:
    """Endless windows of one rank's micro-batches. Every example occurs once per epoch, those of
    ``held`` never.

    Positions count the examples that are not held out, from 0 in each epoch.
    """

    stream: Stream
    collate: Collate
    _: KW_ONLY
    global_batch_size: int
    micro_batch_size: int
    seed: int
    buffer_size: int
    packing: bool = True  # how ``collate`` lays examples out
    shuffle: bool = True
    held: Index = field(default_factory=_nothing)  # items that are not for training, ascending
    rank: int = 0
    world_size: int = 1
    prefetch: Prefetch | None = None  # makes the next window ahead, if its examples are there
    epoch: int = field(default=0, init=False)  # of the next window
    window: int = field(default=0, init=False)  # the next one, counted from 0 in each epoch

    def __post_init__(self) -> None:
        check_sizes(self.global_batch_size, self.micro_batch_size, self.world_size)
        size = self.buffer_size if self.shuffle else self.global_batch_size
        self._blocks = BlockShuffle(size, self.seed, self.shuffle)

    @property
    def num_examples(self) -> int | None:
        """Examples in an epoch, if all of them are encoded."""
        length = self.stream.length
        return None if length is None else length - len(self.held)

    @property
    def steps_per_epoch(self) -> int | None:
        """Windows in an epoch, if that is known."""
        count = self.num_examples
        return None if count is None else -(-count // self.global_batch_size)

    @property
    def progress(self) -> float:
        """Completed epochs, without a fraction in the first: its length depends on how much is
        encoded, and an interrupted run must report the same as one that was not.
        """
        steps = self.steps_per_epoch if self.epoch else None
        return self.epoch + (self.window / steps if steps else 0.0)

    def __iter__(self) -> Iterator[Window]:
        while True:
            yield self.next_window()

    def next_window(self) -> Window:
        """This rank's micro-batches of the next optimizer step; waits for them and advances the
        position.
        """
        at, ahead = (self.epoch, self.window), self.prefetch
        window = self.window_at(*at) if ahead is None else ahead.take(at, self.window_at)
        self.skip()
        if ahead is not None and self._is_there(self.epoch, self.window):
            ahead.begin((self.epoch, self.window), self.window_at)
        return window

    def window_at(self, epoch: int, window: int) -> Window:
        """This rank's micro-batches of any window; waits for them."""
        items = self.items(epoch, window)
        if not len(items):
            raise DataError(f"the data ends before window {window} of epoch {epoch + 1}")
        groups = assign_to_rank(
            items,
            self.stream.lengths(items),
            micro_batch_size=self.micro_batch_size,
            rank=self.rank,
            world_size=self.world_size,
            packing=self.packing,
        )
        return [batch_of(group, self.stream, self.collate) for group in groups]

    def skip(self) -> None:
        """Skip the next window."""
        self.window += 1
        end = self.window * self.global_batch_size
        if self._reach(end + 1) <= end:
            self.epoch, self.window = self.epoch + 1, 0

    def items(self, epoch: int, window: int) -> Index:
        """The items of any window, of all ranks; fewer, or none, at the end of the data."""
        found = [_nothing()]
        position = window * self.global_batch_size
        last = position + self.global_batch_size
        while position < last:
            start, end = self._blocks.around(epoch, position)
            end = min(end, self._reach(end))
            if position >= end:
                break
            order = self._blocks.order(epoch, start, end)
            found.append(order[position - start : last - start])
            position += len(found[-1])
        return self._numbers(np.concatenate(found))

    def state_dict(self) -> dict[str, int | str | bool]:
        """The data position, and the settings on which it depends."""
        shards = self._shards_behind()
        position = {"epoch": self.epoch, "window": self.window, "shards": shards}
        return position | self._identity(shards)

    def load_state_dict(self, state: dict[str, int | str | bool]) -> None:
        """Go to a saved position; raises DataError if it belongs to other data or another order.

        Waits until everything before it is encoded, unless it is in the cache.
        """
        shards = int(state.get("shards", 0))
        check_same({"streaming": "shards" in state, **state}, self._identity(shards))
        self.epoch, self.window = int(state["epoch"]), int(state["window"])

    def _is_there(self, epoch: int, window: int) -> bool:
        """Whether a window can be built without waiting. Only the training thread may wait: the
        encoder that it starts ends with the thread that started it.
        """
        last = (window + 1) * self.global_batch_size - 1
        return self.stream.has(self._blocks.around(epoch, last)[1] + len(self.held))

    def _reach(self, count: int) -> int:
        """Wait until ``count`` examples, or the end of the data; returns how many there are, at
        least.
        """
        return max(0, self.stream.reach(count + len(self.held)) - len(self.held))

    def _numbers(self, positions: Index) -> Index:
        """The items at some positions, without the held-out ones."""
        gaps = self.held - np.arange(len(self.held))  # examples to learn in front of each
        return positions + np.searchsorted(gaps, positions, side="right")

    def _shards_behind(self) -> int:
        """From how many shards the windows so far were read."""
        if self.epoch:
            return self.stream.shards(self.stream.reach(1 << 62))
        position = self.window * self.global_batch_size
        if not position:
            return 0
        _, end = self._blocks.around(0, position - 1)
        end = min(end, self._reach(end)) + len(self.held)
        return self.stream.shards(end)

    def _identity(self, shards: int) -> dict[str, int | str | bool]:
        content = self.stream.content(shards)
        return {
            "streaming": True,
            "seed": self.seed,
            "global_batch_size": self.global_batch_size,
            "shuffle": self.shuffle,
            "buffer_size": self.buffer_size,
            "held": len(self.held),
            "content": "less" if content is None else content,
        }
