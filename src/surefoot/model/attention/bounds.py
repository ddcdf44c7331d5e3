"""Where the documents of a packed row begin and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch


class Bounds:
    """The document boundaries of a row. A compiled layer passes this object on without reading it;
    for a list, it would be compiled again for each length.

    ``branches`` are the tokens of prompt, first and second response of each document, if some share
    a prompt (see ``Batch``). ``group`` are the tokens of a group, if documents attend in groups
    (see ``shifted``).
    """

    def __init__(
        self,
        values: Sequence[int],
        branches: Sequence[Sequence[int]] | None = None,
        group: int | None = None,
    ) -> None:
        self.values, self.branches, self.group = values, branches, group
        self._kept: dict[str, object] = {}

    @property
    def parts(self) -> Sequence[Sequence[int]]:
        """For each document, the tokens of prompt, first and second response; one is all prompt."""
        return self.branches or [(b - a, 0, 0) for a, b in pairwise(self.values)]

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(b - a for a, b in pairwise(self.values))

    def half(self, number: int) -> Bounds:
        """The bounds of groups for the first or the second half of the heads."""
        made = self.kept(f"half {number}", lambda: self._half(number))
        assert isinstance(made, Bounds)
        return made

    def _half(self, number: int) -> Bounds:
        assert self.group is not None
        found, first = [0], self.group - number * (self.group // 2)
        for start, stop in pairwise(self.values):
            found += [*range(start + first, stop, self.group), stop]
        return Bounds(found)

    def on(self, device: torch.device) -> torch.Tensor:
        """[documents + 1] the bounds as int32 on ``device``."""
        made = self.kept("bounds", lambda: torch.tensor(self.values, dtype=torch.int32).to(device))
        assert isinstance(made, torch.Tensor)
        return made

    def kept(self, name: str, make: Callable[[], object]) -> object:
        """Values that are computed from them once, for all layers."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]
