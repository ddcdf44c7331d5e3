"""Assign the examples of a window to ranks and micro-batches so that all have about equal tokens.

All ranks wait for the one with the largest micro-batch, and memory must suffice for the largest
one. So examples are assigned by length to groups of about the same size, one group for each
micro-batch of each rank. The assignment is a pure function of the lengths, in integers.

W windows, N items of each, G groups of each: those of the first micro-batch of every rank, then
those of the second one, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..data_order import Index


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
    count = num_passes(lengths.shape[1], micro_batch_size, world_size)
    if count <= 1:
        return np.zeros_like(lengths)
    found = _by_tokens(lengths, count) if packing else _by_width(lengths, count)
    return _in_turn(found, positions(lengths, found, count, packing=packing), world_size)


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
    found = np.bincount(place.ravel(), values.ravel(), len(groups) * count)
    return found.reshape(-1, count).astype(np.int64)


def _by_tokens(lengths: Index, count: int) -> Index:
    """[W, N] The longest item first, each to the group with the fewest tokens. The largest group
    has at most 4/3 of the tokens of the optimum (Graham 1969). If a split into equal numbers is
    better, it is used."""
    windows, found = np.arange(len(lengths)), np.empty_like(lengths)
    held = np.zeros((len(lengths), count), np.int64)
    for item in np.argsort(-lengths, axis=1, kind="stable").T:
        found[windows, item] = lightest = held.argmin(axis=1)
        held[windows, lightest] += lengths[windows, item]
    sizes = [len(part) for part in np.array_split(np.arange(lengths.shape[1]), count)]
    by_number = np.broadcast_to(np.repeat(np.arange(count), sizes), lengths.shape)
    is_worse = held.max(axis=1) > sums(lengths, by_number, count).max(axis=1)
    found[is_worse] = by_number[is_worse]
    return found


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
    found = np.empty_like(lengths)
    np.put_along_axis(found, order, begins.cumsum(axis=1)[:, :-1], axis=1)
    return found


def _ends(widths: Index, most: Index, count: int, *, is_full: bool = False) -> Index:
    """[W, G] The ends of groups of sorted items with at most ``most`` positions each. ``is_full``:
    each leaves an item for every later one, as far as there are enough."""
    windows, num_items = np.arange(len(widths)), widths.shape[1]
    found, end = np.empty((len(widths), count), np.int64), np.zeros(len(widths), np.int64)
    for group in range(count):
        last = num_items - (count - 1 - group) if is_full else num_items
        taken = most // widths[windows, np.minimum(end, num_items - 1)]
        end = np.minimum(np.minimum(end + taken, np.maximum(last, end + 1)), num_items)
        found[:, group] = end
    return found


def _in_turn(groups: Index, weights: Index, world_size: int) -> Index:
    """[W, N] The same groups, numbered from the largest. Every second micro-batch goes through the
    ranks in reverse, so that no rank always has the larger one."""
    numbers = np.arange(weights.shape[1]).reshape(-1, world_size)
    numbers[1::2] = numbers[1::2, ::-1]
    renamed = np.empty_like(weights)
    order = np.argsort(-weights, axis=1, kind="stable")
    np.put_along_axis(renamed, order, np.broadcast_to(numbers.ravel(), order.shape), axis=1)
    return np.take_along_axis(renamed, groups, axis=1)
