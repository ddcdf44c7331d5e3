"""Pipeline schedules: the order in which a rank runs its stages on the micro-batches of a window.

Pure arithmetic: every rank knows the order of every other one. So the next tensor that one sends is
the next that another expects, and tensors need no labels.

With S stages on P ranks, stage s is on rank s mod P: in order, and again from the first rank for
the next virtual stage of each rank (a *part*).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Literal

ScheduleName = Literal["1f1b", "interleaved", "gpipe"]


@dataclass(frozen=True, slots=True)
class Op:
    """One micro-batch through one of this rank's stages."""

    is_forward: bool
    part: int  # which of the process's stages, from the model's beginning
    index: int  # of the micro-batch


def order(name: ScheduleName, rank: int, size: int, parts: int, count: int) -> list[Op]:
    """The operations of rank ``rank`` of ``size``, with ``parts`` virtual stages, for ``count``
    micro-batches.

    ``1f1b`` (arXiv:1806.03377) runs forward until the last rank has its first micro-batch, and then
    alternates backward and forward, so that a rank stores the activations of at most ``size``
    micro-batches. ``interleaved`` (arXiv:2104.04473) does the same with several virtual stages per
    rank, which idles less. ``gpipe`` (arXiv:1811.06965) runs all forward passes first.
    """
    groups = _groups(size, count)
    forward = [(part, index) for group in groups for part in range(parts) for index in group]
    backward = [(parts - 1 - part, index) for part, index in forward]
    ahead = {
        "1f1b": size - 1 - rank,
        "interleaved": 2 * (size - 1 - rank) + (parts - 1) * len(groups[0]),
        "gpipe": len(forward),
    }[name]
    first = [Op(True, *visit) for visit in forward]
    second = [Op(False, *visit) for visit in backward]
    ahead = min(ahead, len(first))
    steady = chain.from_iterable(zip(first[ahead:], second, strict=False))
    return [*first[:ahead], *steady, *second[len(first) - ahead :]]


def _groups(size: int, count: int) -> list[range]:
    """Number of micro-batches that run through one virtual stage before any runs through the
    next: at least ``size``, if there are so many. With fewer, ranks would wait for each other
    forever."""
    whole = max(1, count // size)
    each, more = divmod(count, whole)
    bounds = [each * i + min(i, more) for i in range(whole + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]
