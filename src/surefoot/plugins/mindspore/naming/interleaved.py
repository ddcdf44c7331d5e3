"""Fused projections with interleaved rows: a group of queries, its key, its value, the next group.

So equal shards of the fused tensor contain complete groups. ``InterleavedSource`` fuses tensors in
this way, ``DeinterleavedSource`` splits them again; both read only the requested rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ....checkpoint.sources.source import ReplacingSource, Shape
from ....parallel.box import Box

_FEW = 16  # rows of a turn; fewer are read together with those in between


@dataclass(frozen=True)
class RowGroup:
    """The number of rows that a tensor contributes at a time."""

    name: str
    rows: int


@dataclass(frozen=True)
class InterleavedSource(ReplacingSource):
    """Tensors fused along the first dimension, each contributing its rows in turn."""

    turns: Mapping[str, tuple[RowGroup, ...]]  # by the name of the fused tensor

    def made(self) -> Mapping[str, tuple[Shape, Sequence[str]]]:
        """The fused tensors."""
        shapes = self.source.shapes()
        return {
            name: (
                (sum(shapes[turn.name][0] for turn in turns), *shapes[turns[0].name][1:]),
                [turn.name for turn in turns],
            )
            for name, turns in self.turns.items()
        }

    def read_made(self, name: str, box: Box) -> torch.Tensor:
        """From each part, only the rows that are in ``box``."""
        turns, dtype = self.turns[name], self.dtypes()[name]
        period = sum(turn.rows for turn in turns)
        found = []
        for first, last in _spans(box.start[0], box.stop[0], period):
            if last - first >= period:  # whole groups
                groups = (last - first) // period
                start = first // period
                parts = [self._rows(t, start * t.rows, groups * t.rows, box) for t in turns]
                shaped = [
                    part.reshape(groups, turn.rows, *box.shape[1:])
                    for part, turn in zip(parts, turns, strict=True)
                ]
                found.append(torch.cat(shaped, 1).flatten(0, 1).to(dtype))
                continue
            group, inside = divmod(first, period)
            for turn in turns:
                start, stop = max(inside, 0), min(inside + last - first, turn.rows)
                if start < stop:
                    rows = self._rows(turn, group * turn.rows + start, stop - start, box)
                    found.append(rows.to(dtype))
                inside -= turn.rows
        return torch.cat(found) if found else torch.empty(box.shape, dtype=dtype)

    def _rows(self, turn: RowGroup, first: int, count: int, box: Box) -> torch.Tensor:
        inner = Box((first, *box.start[1:]), (count, *box.shape[1:]))
        return self.source.read(turn.name, inner)


@dataclass(frozen=True)
class Pick:
    """Rows of a fused tensor at regular distances."""

    name: str
    first: int  # row of the first group
    rows: int  # of each group
    period: int  # rows from group to group


@dataclass(frozen=True)
class DeinterleavedSource(ReplacingSource):
    """The tensors that were fused into another one."""

    picks: Mapping[str, Pick]  # by the name of the part

    def made(self) -> Mapping[str, tuple[Shape, Sequence[str]]]:
        """The parts."""
        shapes = self.source.shapes()
        return {
            name: ((shapes[p.name][0] // p.period * p.rows, *shapes[p.name][1:]), (p.name,))
            for name, p in self.picks.items()
        }

    def read_made(self, name: str, box: Box) -> torch.Tensor:
        """The requested rows of the fused tensor, and those in between if turns are short."""
        pick, found = self.picks[name], []
        for first, last in _spans(box.start[0], box.stop[0], pick.rows):
            group, inside = divmod(first, pick.rows)
            groups = (last - first) // pick.rows
            if pick.rows < _FEW and groups > 1:
                rows = self._rows(pick.name, group * pick.period, groups * pick.period, box)
                shaped = rows.reshape(groups, pick.period, *rows.shape[1:])
                found.append(shaped[:, pick.first : pick.first + pick.rows].flatten(0, 1))
                continue
            for start, stop in _steps(first, last, pick.rows):
                group, inside = divmod(start, pick.rows)
                at = group * pick.period + pick.first + inside
                found.append(self._rows(pick.name, at, stop - start, box))
        return torch.cat(found) if found else torch.empty(box.shape, dtype=self.dtypes()[name])

    def _rows(self, name: str, first: int, count: int, box: Box) -> torch.Tensor:
        return self.source.read(name, Box((first, *box.start[1:]), (count, *box.shape[1:])))


def _spans(first: int, last: int, period: int) -> Iterator[tuple[int, int]]:
    """A range as the rest of a group, complete groups, and a rest."""
    inner, outer = -(-first // period) * period, last // period * period
    whole = [inner, outer] if inner < outer else [min(inner, last)]
    for a, b in pairwise((first, *whole, last)):
        if a < b:
            yield a, b


def _steps(first: int, last: int, period: int) -> Iterator[tuple[int, int]]:
    """A range, group by group."""
    while first < last:
        stop = min((first // period + 1) * period, last)
        yield first, stop
        first = stop
