"""The order of a complete dataset: a permutation of all of it, a new one in each epoch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ...errors import DataError
from ..data_order import Description, Index, permutation
from ..store.dataset import EncodedDataset


@dataclass
class FullShuffle:
    """A permutation of ``examples`` for each epoch."""

    examples: EncodedDataset
    seed: int
    shuffle: bool = True
    is_complete: ClassVar[bool] = True
    _newest: tuple[int, Index] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not len(self.examples):
            raise DataError("there are no examples to load")

    @property
    def num_examples(self) -> int:
        """Examples in an epoch."""
        return len(self.examples)

    def indices(self, epoch: int, start: int, end: int) -> Index:
        """The examples at positions from ``start`` to ``end``; fewer where the epoch ends."""
        return self._permutation(epoch)[start:end]

    def reach(self, count: int) -> int:
        """How many examples an epoch has; all of them are known."""
        return len(self.examples)

    def is_ready(self, epoch: int, last: int) -> bool:
        """True: there is nothing to wait for."""
        return True

    def describe(self, epoch: int, position: int) -> Description:
        """What the order is a function of, the same at every position."""
        return {
            "length": len(self.examples),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "dataset": self.examples.fingerprint,
        }

    def describe_like(self, saved: Description) -> Description:
        """The same, whatever was saved."""
        return self.describe(0, 0)

    def _permutation(self, epoch: int) -> Index:
        if not self.shuffle:
            return np.arange(len(self.examples))
        known = self._newest  # read once: another thread may replace it
        if known is None or known[0] != epoch:
            known = epoch, permutation(len(self.examples), seed=self.seed, stream=epoch)
            self._newest = known
        return known[1]
