"""In which order a process of a pipeline runs its stages on the micro-batches of a window.

Pure arithmetic: every process knows the order of every other one. So what one sends first another
expects first, and tensors need no labels on their way.

With S stages on P processes, stage s is on process s mod P: one after the other, and once more from
the first for the next *part* of each process.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Literal

ScheduleName = Literal["1f1b", "interleaved", "gpipe"]


@dataclass(frozen=True, slots=True)
class Op:
    """One micro-batch through one of this process's stages."""

    is_forward: bool
    part: int  # which of the process's stages, from the model's beginning
    index: int  # of the micro-batch


def order(name: ScheduleName, rank: int, size: int, parts: int, count: int) -> list[Op]:
    """What process ``rank`` of ``size``, with ``parts`` stages, does with ``count`` micro-batches.

    ``1f1b`` (arXiv:1806.03377) goes forward until the last process has its first micro-batch, and
    from then on backward once for each time forward, so that a process holds the activations of at
    most ``size`` micro-batches. ``interleaved`` (arXiv:2104.04473) does the same with several
    stages a process, which idles less. ``gpipe`` (arXiv:1811.06965) goes forward with all of them
    first.
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
    """Micro-batches that go through one part before any of them goes through the next: at least
    ``size``, where there are so many. With fewer, processes would wait for each other forever."""
    whole = max(1, count // size)
    each, more = divmod(count, whole)
    bounds = [each * i + min(i, more) for i in range(whole + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]
