"""The order of the examples of an epoch: blocks of examples, each permuted by itself.

A complete dataset is one block, all of it. Data that is still being encoded has blocks of one size.
The order is a pure function of (seed, epoch, position), so a position is all that a resume needs. A
shuffle buffer would have to be saved, or filled again. The order does not depend on the progress of
encoding.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...errors import DataError
from ..data_order import Description, Index, draw, permutation
from ..store.dataset import EncodedDataset, ExampleStream

EPOCHS = 1 << 40  # streams of random numbers of one epoch
NOTHING = np.empty(0, np.int64)


@dataclass
class Shuffle:
    """Blocks of ``buffer_size`` examples; None: all of a complete dataset. From the second epoch
    on, the first block of an epoch is shorter, so that an example shares its block with other
    examples in each.

    Examples that are ``held_out`` are never drawn, and positions do not count them.
    """

    examples: EncodedDataset | ExampleStream
    seed: int
    shuffle: bool = True
    buffer_size: int | None = None
    held_out: Index = field(default_factory=lambda: NOTHING)  # ascending
    _newest: tuple[tuple[int, int, int], Index] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.is_complete and not self.examples.length:
            raise DataError("there are no examples to load")

    @property
    def is_complete(self) -> bool:
        """Whether all examples are known from the beginning."""
        return self.buffer_size is None

    @property
    def num_examples(self) -> int | None:
        """Examples in an epoch, if all of them are encoded."""
        length = self.examples.length
        return None if length is None else length - len(self.held_out)

    def indices(self, epoch: int, start: int, end: int) -> Index:
        """The examples at positions from ``start`` to ``end``, once encoded; fewer at the end."""
        if not self.shuffle:
            return self._numbers(np.arange(start, max(start, min(end, self.reach(end)))))
        block_slices, position = [NOTHING], start
        while position < end:
            first, last = self._block(epoch, position)
            last = min(last, self.reach(last))
            if position >= last:
                break
            block = self._permutation(epoch, first, last)
            block_slices.append(block[position - first : end - first])
            position += len(block_slices[-1])
        return self._numbers(np.concatenate(block_slices))

    def reach(self, count: int) -> int:
        """Wait for ``count`` examples, or for the end of the data; returns how many are known."""
        num_held_out = len(self.held_out)
        return max(0, self.examples.reach(count + num_held_out) - num_held_out)

    def is_ready(self, epoch: int, last: int) -> bool:
        """Whether the examples up to the position ``last`` can be drawn without waiting."""
        return self.examples.has(self._block(epoch, last)[1] + len(self.held_out))

    def describe(self, epoch: int, position: int) -> Description:
        """What the examples before a position depend on; ``shards``: from how many they come."""
        if self.is_complete:
            return self.describe_like({})
        shards = self._shards_before(epoch, position)
        return {"shards": shards, **self.describe_like({"shards": shards})}

    def describe_like(self, saved: Description) -> Description:
        """The same of this order, once as many shards as were saved are encoded."""
        examples_description = self.examples.describe(int(saved.get("shards", 0)))
        how: Description = {"seed": self.seed, "shuffle": self.shuffle, **examples_description}
        if self.buffer_size is None:
            return how
        num_held_out = len(self.held_out)
        return {**how, "streaming": True, "buffer_size": self.buffer_size, "held": num_held_out}

    def _block(self, epoch: int, position: int) -> tuple[int, int]:
        """Start and end of the block of a position, if the data is that long; unshuffled, of
        one."""
        if not self.shuffle:
            return position, position + 1
        if self.buffer_size is None:
            return 0, self.examples.length or 0
        shift = draw(self.buffer_size, seed=self.seed, stream=epoch) if epoch else 0
        first = self.buffer_size - shift
        if position < first:
            return 0, first
        start = position - (position - first) % self.buffer_size
        return start, start + self.buffer_size

    def _permutation(self, epoch: int, start: int, end: int) -> Index:
        """The positions of a block in permuted order."""
        place = epoch, start, end
        cached = self._newest  # read once: another thread may replace it
        if cached is None or cached[0] != place:
            stream = epoch if self.is_complete else epoch * EPOCHS + start
            cached = place, permutation(end - start, seed=self.seed, stream=stream) + start
            self._newest = cached
        return cached[1]

    def _numbers(self, positions: Index) -> Index:
        """The examples at some positions, without the held-out ones."""
        gaps = self.held_out - np.arange(len(self.held_out))  # examples to train on before each
        return positions + np.searchsorted(gaps, positions, side="right")

    def _shards_before(self, epoch: int, position: int) -> int:
        """From how many shards the examples before a position were drawn."""
        if epoch:
            return self.examples.shards(self.examples.reach(1 << 62))
        if not position:
            return 0
        _, end = self._block(0, position - 1)
        return self.examples.shards(min(end, self.reach(end)) + len(self.held_out))
