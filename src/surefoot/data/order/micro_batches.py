"""The micro-batches of one rank from the examples of a global window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

import numpy as np

from ...batch import IGNORE_INDEX, Batch, Features, Window
from ...errors import DataError
from ..data_order import Index
from ..store.dataset import num_tokens
from .length_balancing import balance_by_length, num_passes, positions

Collate = Callable[[Sequence[Features]], Batch]


def fitting_micro_batch(examples: int, most: int) -> int:
    """The largest micro-batch size up to ``most`` that divides the ``examples`` of a rank."""
    return max(size for size in range(1, most + 1) if examples % size == 0)


def check_divides(num_examples: int, micro_batch_size: int, num_ranks: int) -> None:
    """Raise ``DataError`` unless ``num_examples`` are full micro-batches for all ranks."""
    per_pass = micro_batch_size * num_ranks
    if num_examples % per_pass == 0:
        return
    larger = f"train.global_batch_size={-(-num_examples // per_pass) * per_pass}"
    ways = larger
    if num_examples % num_ranks == 0:
        fits = fitting_micro_batch(num_examples // num_ranks, micro_batch_size)
        ways = f"train.micro_batch_size={fits}, which computes the same steps, or {larger}"
    raise DataError(
        f"train.global_batch_size ({num_examples}) is not a multiple of train.micro_batch_size x "
        f"data-parallel ranks ({micro_batch_size} x {num_ranks} = {per_pass}); set {ways}"
    )


@dataclass(frozen=True)
class Batching:
    """Assigns examples to micro-batches and ranks by length: a pure function of the examples, the
    same for loaded ones and for those that a stage made."""

    collate: Collate
    _: KW_ONLY
    micro_batch_size: int
    packing: bool = True  # how ``collate`` lays examples out
    rank: int = 0
    world_size: int = 1

    def check(self, num_examples: int) -> None:
        """Raise ``DataError`` unless ``num_examples`` are full micro-batches for all ranks."""
        check_divides(num_examples, self.micro_batch_size, self.world_size)

    def groups(self, lengths: Index) -> list[Index]:
        """The examples of each of this rank's micro-batches, from the tokens of all examples.

        Some are empty if fewer examples than ranks are left, because all ranks have the same number
        of micro-batches.
        """
        size, ranks = self.micro_batch_size, self.world_size
        dealt = balance_by_length(
            lengths[None], micro_batch_size=size, world_size=ranks, packing=self.packing
        )[0]
        count = num_passes(len(lengths), size, ranks)
        return [np.flatnonzero(dealt == group) for group in range(self.rank, count, ranks)]

    def most_positions(self, lengths: Index) -> int:
        """The tokens of the largest micro-batch of any rank, padding included."""
        size, ranks = self.micro_batch_size, self.world_size
        dealt = balance_by_length(
            lengths[None], micro_batch_size=size, world_size=ranks, packing=self.packing
        )
        count = num_passes(len(lengths), size, ranks)
        return int(positions(lengths[None], dealt, count, packing=self.packing).max())

    def window(
        self,
        examples: Sequence[Features],
        *,
        lengths: Index | None = None,
        spares: Items | None = None,
    ) -> Window:
        """This rank's micro-batches of the examples of a global window.

        Args:
            examples: of all ranks, in the same order on each.
            lengths: the tokens of each, if they are known without reading the examples.
            spares: the first of them is masked for a rank without examples, and not read otherwise;
                ``examples`` by default.
        """
        if lengths is None:
            lengths = np.array([num_tokens(example) for example in examples], np.int64)
        groups = self.groups(lengths)
        return [batch_of(group, examples, self.collate, spares) for group in groups]


class Items(Protocol):
    """Anything that has the features of examples by their number."""

    def __getitem__(self, item: int, /) -> Features: ...


def batch_of(group: Index, items: Items, collate: Collate, spares: Items | None = None) -> Batch:
    """The batch of a group; of none, the first of ``spares`` (or ``items``) without labels."""
    rows = [items[int(item)] for item in group]
    return collate(rows or [without_labels((items if spares is None else spares)[0])])


def without_labels(example: Features) -> Features:
    """The same example, fully masked: for a rank without examples, because all ranks of a sharded
    model must run the same number of passes."""
    return {**example, "labels": [IGNORE_INDEX] * len(example["labels"])}
