"""Block shuffle, the order of data that is still being encoded: blocks of one size, each permuted
by itself.

It is a pure function of (seed, epoch, position), like the order of a complete dataset, so a
position is all that a resume needs. A shuffle buffer would have to be saved, or filled again. The
order does not depend on the progress of encoding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ..data_order import Description, Index, draw, permutation
from ..store.stream import ExampleStream

EPOCHS = 1 << 40  # streams of random numbers of one epoch


def _nothing() -> Index:
    return np.empty(0, np.int64)


@dataclass
class BlockShuffle:
    """Blocks of ``buffer_size`` examples. From the second epoch on, the first block of an epoch is
    shorter, so that an example shares its block with other examples in each.

    Examples that are ``held_out`` are never drawn, and positions do not count them.
    """

    examples: ExampleStream
    seed: int
    buffer_size: int
    shuffle: bool = True
    held_out: Index = field(default_factory=_nothing)  # ascending
    is_complete: ClassVar[bool] = False
    _newest: tuple[tuple[int, int, int], Index] | None = field(default=None, init=False, repr=False)

    @property
    def num_examples(self) -> int | None:
        """Examples in an epoch, if all of them are encoded."""
        length = self.examples.length
        return None if length is None else length - len(self.held_out)

    def indices(self, epoch: int, start: int, end: int) -> Index:
        """The examples at positions from ``start`` to ``end``, once encoded; fewer at the end."""
        if not self.shuffle:
            return self._numbers(np.arange(start, max(start, min(end, self.reach(end)))))
        found, position = [_nothing()], start
        while position < end:
            first, last = self._block(epoch, position)
            last = min(last, self.reach(last))
            if position >= last:
                break
            found.append(self._permutation(epoch, first, last)[position - first : end - first])
            position += len(found[-1])
        return self._numbers(np.concatenate(found))

    def reach(self, count: int) -> int:
        """Wait for ``count`` examples, or for the end of the data; returns how many are known."""
        num_held_out = len(self.held_out)
        return max(0, self.examples.reach(count + num_held_out) - num_held_out)

    def is_ready(self, epoch: int, last: int) -> bool:
        """Whether the examples up to the position ``last`` can be drawn without waiting."""
        return self.examples.has(self._block(epoch, last)[1] + len(self.held_out))

    def describe(self, epoch: int, position: int) -> Description:
        """What the examples before a position depend on; ``shards``: from how many they come."""
        shards = self._shards_before(epoch, position)
        return {"shards": shards, **self._describe(shards)}

    def describe_like(self, saved: Description) -> Description:
        """The same of this order, once as many shards as were saved are encoded."""
        return self._describe(int(saved.get("shards", 0)))

    def _block(self, epoch: int, position: int) -> tuple[int, int]:
        """Start and end of the block of a position, if the data is that long; unshuffled, of
        one."""
        if not self.shuffle:
            return position, position + 1
        shift = draw(self.buffer_size, seed=self.seed, stream=epoch) if epoch else 0
        first = self.buffer_size - shift
        if position < first:
            return 0, first
        start = position - (position - first) % self.buffer_size
        return start, start + self.buffer_size

    def _permutation(self, epoch: int, start: int, end: int) -> Index:
        """The positions of a block in permuted order."""
        place = epoch, start, end
        known = self._newest  # read once: another thread may replace it
        if known is None or known[0] != place:
            stream = epoch * EPOCHS + start
            known = place, permutation(end - start, seed=self.seed, stream=stream) + start
            self._newest = known
        return known[1]

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

    def _describe(self, shards: int) -> Description:
        content = self.examples.content(shards)
        return {
            "streaming": True,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "buffer_size": self.buffer_size,
            "held": len(self.held_out),
            "content": "less" if content is None else content,
        }
