"""Block shuffle, for data of unknown length: blocks of one size, each permuted by itself.

The order is a pure function of (seed, epoch, position), as for data of known length, so a position
is all that a resume needs. A shuffle buffer would have to be saved, or filled again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..data_order import Index, draw, permutation

EPOCHS = 1 << 40  # streams of random numbers of one epoch


@dataclass
class BlockShuffle:
    """Blocks of ``size`` items. From the second epoch on, the first block is shorter, so that an
    example shares its block with other examples in each epoch.
    """

    size: int
    seed: int
    shuffle: bool = True
    _newest: tuple[tuple[int, int, int], Index] | None = field(default=None, init=False)

    def around(self, epoch: int, position: int) -> tuple[int, int]:
        """Start and end of the block of a position, assuming that the data is long enough."""
        moved = epoch and self.shuffle
        first = self.size - (draw(self.size, seed=self.seed, stream=epoch) if moved else 0)
        if position < first:
            return 0, first
        start = position - (position - first) % self.size
        return start, start + self.size

    def order(self, epoch: int, start: int, end: int) -> Index:
        """The items of a block in permuted order."""
        if not self.shuffle:
            return np.arange(start, end)
        place = epoch, start, end
        known = self._newest  # of one moment: a thread may look ahead
        if known is None or known[0] != place:
            stream = epoch * EPOCHS + start
            known = place, permutation(end - start, seed=self.seed, stream=stream) + start
            self._newest = known
        return known[1]
