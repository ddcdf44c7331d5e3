"""Which examples of a window run together, and in which process.

All processes wait for the one with the heaviest pass, and memory is for the heaviest of all, so
examples are dealt by their lengths to groups of about the same size, a group for each pass of each
process. Who gets what is a pure function of the lengths, in integers.

W windows, N items of each, G groups of each: those of the first pass of every rank, then those of
the second one, and so on.
"""

from __future__ import annotations

import numpy as np

from .mix import Index


def share(
    items: Index,
    lengths: Index,
    *,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    packing: bool,
) -> list[Index]:
    """The items of each of a rank's passes, of those of a window, in the order of the window."""
    dealt = deal(
        lengths[None], micro_batch_size=micro_batch_size, world_size=world_size, packing=packing
    )[0]
    count = num_groups(len(items), micro_batch_size, world_size)
    return [items[dealt == group] for group in range(rank, count, world_size)]


def num_groups(num_items: int, micro_batch_size: int, world_size: int) -> int:
    """Groups of a window: as many passes for each rank as ``micro_batch_size`` asks for."""
    return -(-num_items // (micro_batch_size * world_size)) * world_size


def deal(lengths: Index, *, micro_batch_size: int, world_size: int, packing: bool) -> Index:
    """[W, N] The group of each item of windows alike, from its tokens (``lengths``, [W, N]).

    Packed, an item goes to the group with the fewest tokens, the longest first; a group has
    ``micro_batch_size`` items on average. Padded, items of about the same length go together, as
    evenly by number as may be, so that none is much wider than the others in its rectangle.

    The heaviest groups run first, those of a pass are as equal as may be, and the largest is never
    larger than that of a split by number.
    """
    count = num_groups(lengths.shape[1], micro_batch_size, world_size)
    if count <= 1:
        return np.zeros_like(lengths)
    by_number = np.broadcast_to(_by_number(lengths.shape[1], count), lengths.shape)
    if packing:
        found = _by_tokens(lengths, count)
        largest = [positions(lengths, g, count, packing=True).max(1) for g in (found, by_number)]
        is_worse = largest[0] > largest[1]
        found[is_worse] = by_number[is_worse]
    else:
        found = np.empty_like(lengths)
        order = np.argsort(lengths, axis=1, kind="stable")  # where numbers differ, fewer are wide
        np.put_along_axis(found, order, by_number, axis=1)
    return _in_turn(found, positions(lengths, found, count, packing=packing), world_size)


def positions(lengths: Index, groups: Index, count: int, *, packing: bool) -> Index:
    """[W, G] What each of ``count`` groups is laid out in: its tokens, or those of its longest item
    for each of its items."""
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


def _by_number(num_items: int, count: int) -> Index:
    """[N] Groups of as many items each; the first ones have one more where that does not go."""
    sizes = np.full(count, num_items // count)
    sizes[: num_items % count] += 1
    return np.repeat(np.arange(count), sizes)


def _by_tokens(lengths: Index, count: int) -> Index:
    """[W, N] Longest first, each to the group with the fewest tokens: at most 4/3 of what the best
    of all splits has in its largest group (Graham 1969)."""
    windows, found = np.arange(len(lengths)), np.empty_like(lengths)
    held = np.zeros((len(lengths), count), np.int64)
    for item in np.argsort(-lengths, axis=1, kind="stable").T:
        found[windows, item] = lightest = held.argmin(axis=1)
        held[windows, lightest] += lengths[windows, item]
    return found


def _in_turn(groups: Index, weights: Index, world_size: int) -> Index:
    """[W, N] The same groups, numbered from the heaviest to the lightest; every second pass goes
    through the ranks backwards, so that none has the heavier one each time."""
    numbers = np.arange(weights.shape[1]).reshape(-1, world_size)
    numbers[1::2] = numbers[1::2, ::-1]
    renamed = np.empty_like(weights)
    order = np.argsort(-weights, axis=1, kind="stable")
    np.put_along_axis(renamed, order, np.broadcast_to(numbers.ravel(), order.shape), axis=1)
    return np.take_along_axis(renamed, groups, axis=1)
