"""Tensors that are computed from others of a source, such as quantized weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ...parallel.box import Box
from .source import ReplacingSource, Shape, read_whole


class Computed(Protocol):
    """A tensor that is computed from others."""

    @property
    def shape(self) -> Shape:
        """Of the result."""

    @property
    def parts(self) -> Mapping[str, str]:
        """The names of the others by role; the result has the dtype of the first one."""

    @property
    def unused(self) -> Sequence[str]:
        """Names of tensors that it makes needless, besides the parts."""

    def compute(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The values, from the parts by role."""


@dataclass(frozen=True)
class ComputedSource(ReplacingSource):
    """A source in which tensors are replaced by others that are computed from them. For any box,
    all of a tensor is computed, and kept until another one is."""

    computed: Mapping[str, Computed]
    _last: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def made(self) -> Mapping[str, tuple[Shape, Sequence[str]]]:
        """The new tensors."""
        each = self.computed.items()
        return {name: (one.shape, [*one.parts.values(), *one.unused]) for name, one in each}

    def read_made(self, name: str, box: Box) -> torch.Tensor:
        """Computed from its parts, which are read in full."""
        whole = Box.whole(self.computed[name].shape)
        found = self._last.get(name)
        if found is None:
            found = self._compute(name)
            self._last.clear()
            if box != whole:
                self._last[name] = found
        return found[box.slices_in(whole)]

    def _compute(self, name: str) -> torch.Tensor:
        one = self.computed[name]
        return one.compute({role: read_whole(self.source, n) for role, n in one.parts.items()})
