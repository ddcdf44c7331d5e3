"""Examples to micro-batches: what is in each, and how it is laid out.

All ranks wait for the one with the largest micro-batch, and memory must suffice for the largest
one. So the examples of a window are assigned by length to groups of about the same size, one group
for each micro-batch of each rank. The assignment is a pure function of the lengths, in integers.

W windows, N items of each, G groups of each: those of the first micro-batch of every rank, then
those of the second one, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from typing import Protocol

import numpy as np

from ...batch import Batch, Features, Window, without_labels
from ...errors import DataError
from ...log import fell_back
from ..data_order import Index
from ..media.batch_media import BatchMedia, has_pictures
from ..store.cache import num_tokens
from ..text.collation import prompts_in_common, unshared


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


@cache
def _say_unshared() -> None:
    why = "in packed rows of this model, responses that share one are not proven to be right"
    fell_back("the prompt of several responses is computed for each", why, "takes longer")


@dataclass(frozen=True)
class Collation:
    """How examples become a batch, wherever one is made: to train, to evaluate, to precompute a
    column, to plan or to measure speed."""

    collate: Callable[..., Batch]  # of the stage: ``collate(features, packing=...)``
    packing: bool = True
    sharing: Sharing | None = None  # of the model; None: whatever ``collate`` does
    media: BatchMedia | None = None  # of a model that reads pictures, too

    def prompts_in_common(self, examples: Sequence[Features]) -> Index:
        """[N] for each example the tokens that a row may share with the example before it."""
        is_proven = self.sharing is not None and self.sharing.is_proven
        if not (len(examples) and self.packing and is_proven):
            return np.zeros(len(examples), np.int64)
        return np.array(prompts_in_common(examples), np.int64)

    def for_model(self, sharing: Sharing) -> Collation:
        """The same for a model, with a prompt for each response if it cannot share prompts."""
        return replace(self, sharing=sharing)

    def batch(self, features: Sequence[Features]) -> Batch:
        """The batch of some examples, at least one."""
        if self.media is not None:
            features = self.media.complete(features)
        collated = self.collate(features, packing=self.packing)
        if self.sharing is not None and not self.sharing.is_proven:
            if collated.branches is not None:
                _say_unshared()
            collated = unshared(collated)
        return collated if self.media is None else self.media.added(collated, features)

    def among(self, examples: Sequence[Features], num_ranks: int) -> Collation:
        """The same for the micro-batches of ``examples``, which several ranks compute together: if
        any of them has a picture, each micro-batch of every rank gets one."""
        if self.media is None or num_ranks == 1 or not has_pictures(examples):
            return self
        return replace(self, media=self.media.with_spare())

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

    def groups(self, lengths: Index, examples: Sequence[Features] = ()) -> list[Index]:
        """The examples of each of this rank's micro-batches, from the tokens of all examples, and
        from the ``examples`` themselves where neighbors may share their prompt.

        Some are empty if fewer examples than ranks are left, because all ranks have the same number
        of micro-batches.
        """
        groups, count = self._groups_of(lengths)
        common = self.collation.prompts_in_common(examples)
        if common.any():
            sizes = self.micro_batch_size, self.world_size
            groups = _sharing_prompts(lengths, common, groups, count, *sizes)
        local_groups = range(self.rank, count, self.world_size)
        return [np.flatnonzero(groups[0] == group) for group in local_groups]

    def most_positions(self, lengths: Index) -> int:
        """The tokens of the largest micro-batch of any rank, padding included."""
        groups, count = self._groups_of(lengths)
        return int(positions(lengths[None], groups, count, packing=self.collation.packing).max())

    def _groups_of(self, lengths: Index) -> tuple[Index, int]:
        """[1, N] the group of each example, and how many groups there are."""
        size, ranks, packing = self.micro_batch_size, self.world_size, self.collation.packing
        groups = balance_by_length(
            lengths[None], micro_batch_size=size, world_size=ranks, packing=packing
        )
        return groups, num_passes(len(lengths), size, ranks)

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
        # Loaded examples are not read for it: no rank needs those of the others, nor their prompts.
        made = examples if lengths is None else ()
        lengths = np.array([num_tokens(e) for e in made], np.int64) if lengths is None else lengths
        groups = self.groups(lengths, made)
        collation = self.collation.among(examples, self.world_size)
        return [collation.batch_of(group, examples, spares) for group in groups]


def in_turn(num_items: int, size: int, rank: int, world_size: int) -> Iterator[Index]:
    """The items of each of a rank's micro-batches, ``size`` at a time, in order. Every rank has as
    many micro-batches; the last one may be empty on some."""
    for start in range(0, num_items, size * world_size):
        first = start + size * rank
        yield np.arange(first, max(first, min(first + size, num_items)))


def num_passes(num_items: int, micro_batch_size: int, world_size: int) -> int:
    """Number of groups of a window: enough micro-batches per rank for ``micro_batch_size``."""
    return -(-num_items // (micro_batch_size * world_size)) * world_size


def balance_by_length(
    lengths: Index, *, micro_batch_size: int, world_size: int, packing: bool
) -> Index:
    """[W, N] The group of each item, from the items' tokens (``lengths``, [W, N]).

    Packed: an item is assigned to the group with the fewest tokens, the longest item first. Padded:
    items of about the same length form a rectangle, with fewer items where these are long. A group
    has ``micro_batch_size`` items on average. The largest group never has more ``positions`` than
    that of a split into equal numbers. The largest groups run first, so that those that run
    together are about equal.
    """
    # Split by number, 8 ranks of 4 examples computed 0.54 to 0.74 of their time, and waited for the
    # rank with the longest rows for the rest; so it is 0.95 to 0.98 (decisions/0036).
    count = num_passes(lengths.shape[1], micro_batch_size, world_size)
    if count <= 1:
        return np.zeros_like(lengths)
    groups = _by_tokens(lengths, count) if packing else _by_width(lengths, count)
    return _in_turn(groups, positions(lengths, groups, count, packing=packing), world_size)


def positions(lengths: Index, groups: Index, count: int, *, packing: bool) -> Index:
    """[W, G] The size of each group: its tokens; padded, the longest times the number of items."""
    if packing:
        return sums(lengths, groups, count)
    widest = np.zeros((len(lengths), count), np.int64)
    np.maximum.at(widest, (np.arange(len(lengths))[:, None], groups), lengths)
    return widest * sums(np.ones_like(lengths), groups, count)


def sums(values: Index, groups: Index, count: int) -> Index:
    """[W, G] The sum of ``values`` [W, N] in each of ``count`` groups."""
    place = groups + count * np.arange(len(groups))[:, None]
    totals = np.bincount(place.ravel(), values.ravel(), len(groups) * count)
    return totals.reshape(-1, count).astype(np.int64)


def _by_tokens(lengths: Index, count: int) -> Index:
    """[W, N] The longest item first, each to the group with the fewest tokens. The largest group
    has at most 4/3 of the tokens of the optimum (Graham 1969). If a split into equal numbers is
    better, it is used."""
    # No group has a limit of ``micro_batch_size`` items: what a packed row takes is tokens. With
    # one, 8 ranks computed 0.89 to 0.97 of their time; differencing (Karmarkar and Karp) would gain
    # 2 % more (decisions/0036).
    windows, groups = np.arange(len(lengths)), np.empty_like(lengths)
    group_tokens = np.zeros((len(lengths), count), np.int64)
    for item in np.argsort(-lengths, axis=1, kind="stable").T:
        groups[windows, item] = lightest = group_tokens.argmin(axis=1)
        group_tokens[windows, lightest] += lengths[windows, item]
    by_number = np.broadcast_to(_by_number(lengths.shape[1], count), lengths.shape)
    is_worse = group_tokens.max(axis=1) > sums(lengths, by_number, count).max(axis=1)
    groups[is_worse] = by_number[is_worse]
    return groups


def _by_number(num_items: int, count: int) -> Index:
    """[N] The group of each item in a split into equal numbers."""
    return np.arange(count).repeat([len(p) for p in np.array_split(range(num_items), count)])


def _sharing_prompts(
    lengths: Index, common: Index, alone: Index, count: int, size: int, world_size: int
) -> Index:
    """[1, N] The groups of one window in which ranks wait for the fewest tokens: of items one by
    one (``alone``), or of up to ``size`` neighbors at a time that share a prompt. ``common`` [N]
    are the tokens that an item may share with the one before it."""

    def waited(totals: Index) -> int:  # the largest group of each micro-batch
        return int(np.sort(totals[0])[::-1][::world_size].sum())

    # The bound of ``balance_by_length`` holds here, too.
    limit = sums(lengths[None], _by_number(len(lengths), count)[None], count).max()
    best, least = alone, waited(sums(lengths[None], alone, count))
    first = np.maximum.accumulate(np.where(common == 0, np.arange(len(common)), 0))
    while size > 1:  # more at a time share more, and are harder to divide equally among ranks
        is_start = (np.arange(len(common)) - first) % size == 0
        tokens = np.bincount(is_start.cumsum() - 1, lengths - np.where(is_start, 0, common))[None]
        groups = _by_tokens(tokens.astype(np.int64), count)
        totals = sums(tokens, groups, count)
        if totals.max() <= limit and waited(totals) < least:
            least = waited(totals)
            best = _in_turn(groups, totals, world_size)[:, is_start.cumsum() - 1]
        size //= 2
    return best


def _by_width(lengths: Index, count: int) -> Index:
    """[W, N] Sort, and split into ``count`` rectangles of the smallest sufficient size."""
    order = np.argsort(-lengths, axis=1, kind="stable")
    widths = np.maximum(1, np.take_along_axis(lengths, order, axis=1))
    low, high = widths[:, 0], widths[:, 0] * -(-lengths.shape[1] // count)
    while (low < high).any():
        middle = (low + high) // 2
        fits = _ends(widths, middle, count)[:, -1] == lengths.shape[1]
        low, high = np.where(fits, low, middle + 1), np.where(fits, middle, high)
    ends = _ends(widths, high, count, is_full=True)
    begins = sums(np.ones_like(ends), ends, lengths.shape[1] + 1)  # how many groups end before
    groups = np.empty_like(lengths)
    np.put_along_axis(groups, order, begins.cumsum(axis=1)[:, :-1], axis=1)
    return groups


def _ends(widths: Index, most: Index, count: int, *, is_full: bool = False) -> Index:
    """[W, G] The ends of groups of sorted items with at most ``most`` positions each. ``is_full``:
    each leaves an item for every later one, as far as there are enough."""
    windows, num_items = np.arange(len(widths)), widths.shape[1]
    ends, end = np.empty((len(widths), count), np.int64), np.zeros(len(widths), np.int64)
    for group in range(count):
        last = num_items - (count - 1 - group) if is_full else num_items
        taken = most // widths[windows, np.minimum(end, num_items - 1)]
        end = np.minimum(np.minimum(end + taken, np.maximum(last, end + 1)), num_items)
        ends[:, group] = end
    return ends


def _in_turn(groups: Index, weights: Index, world_size: int) -> Index:
    """[W, N] The same groups, numbered from the largest. Every second micro-batch goes through the
    ranks in reverse, so that no rank always has the larger one."""
    numbers = np.arange(weights.shape[1]).reshape(-1, world_size)
    numbers[1::2] = numbers[1::2, ::-1]
    renamed = np.empty_like(weights)
    order = np.argsort(-weights, axis=1, kind="stable")
    np.put_along_axis(renamed, order, np.broadcast_to(numbers.ravel(), order.shape), axis=1)
    return np.take_along_axis(renamed, groups, axis=1)
