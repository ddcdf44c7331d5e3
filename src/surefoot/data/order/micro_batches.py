"""Examples to micro-batches: what is in each, and how it is laid out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Protocol

import numpy as np

from ...batch import IGNORE_INDEX, Batch, Features, Window
from ...errors import DataError
from ..data_order import Index
from ..store.dataset import num_tokens
from ..text.pairs import unshared
from .length_balancing import balance_by_length, num_passes, positions


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


class Items(Protocol):
    """Anything that has the features of examples by their number."""

    def __getitem__(self, item: int, /) -> Features: ...


class Sharing(Protocol):
    """Whether a model may compute the prompt of two responses once."""

    @property
    def is_proven(self) -> bool:
        """So it has been checked."""


@dataclass(frozen=True)
class Collation:
    """How examples become a batch, wherever one is made: to train, to evaluate, to precompute a
    column, to plan or to measure speed."""

    collate: Callable[..., Batch]  # of the stage: ``collate(features, packing=...)``
    packing: bool = True
    sharing: Sharing | None = None  # of the model; None: whatever ``collate`` does

    def for_model(self, sharing: Sharing) -> Collation:
        """The same for a model, with a prompt for each response if it cannot share prompts."""
        return replace(self, sharing=sharing)

    def batch(self, features: Sequence[Features]) -> Batch:
        """The batch of some examples, at least one."""
        made = self.collate(features, packing=self.packing)
        return made if self.sharing is None or self.sharing.is_proven else unshared(made)

    def batch_of(self, group: Index, items: Items, spares: Items | None = None) -> Batch:
        """The batch of a group; of none, the first of ``spares`` (or ``items``) without labels."""
        rows = [items[int(item)] for item in group]
        return self.batch(rows or [without_labels((items if spares is None else spares)[0])])


@dataclass(frozen=True)
class Batching:
    """Assigns examples to micro-batches and ranks by length: a pure function of the examples, the
    same for loaded ones and for those that a stage made."""

    collation: Collation
    _: KW_ONLY
    micro_batch_size: int
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
            lengths[None], micro_batch_size=size, world_size=ranks, packing=self.collation.packing
        )[0]
        count = num_passes(len(lengths), size, ranks)
        return [np.flatnonzero(dealt == group) for group in range(self.rank, count, ranks)]

    def most_positions(self, lengths: Index) -> int:
        """The tokens of the largest micro-batch of any rank, padding included."""
        size, ranks = self.micro_batch_size, self.world_size
        dealt = balance_by_length(
            lengths[None], micro_batch_size=size, world_size=ranks, packing=self.collation.packing
        )
        count = num_passes(len(lengths), size, ranks)
        return int(positions(lengths[None], dealt, count, packing=self.collation.packing).max())

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
        return [self.collation.batch_of(group, examples, spares) for group in groups]


def without_labels(example: Features) -> Features:
    """The same example, fully masked: for a rank without examples, because all ranks of a sharded
    model must run the same number of passes."""
    return {**example, "labels": [IGNORE_INDEX] * len(example["labels"])}
