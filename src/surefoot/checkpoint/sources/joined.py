"""Join tensor sources of different names into one, for example weights and Adam moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ...parallel.box import Box
from .source import Shape, TensorSource, once


@dataclass(frozen=True)
class JoinedSource:
    """Sources whose names, with their prefixes, are all different."""

    parts: Sequence[tuple[str, TensorSource]]  # each with what stands before its names

    @cached_property
    def _places(self) -> Mapping[str, tuple[TensorSource, str]]:
        return {
            f"{prefix}{name}": (part, name) for prefix, part in self.parts for name in part.shapes()
        }

    @once
    def shapes(self) -> Mapping[str, Shape]:
        """Of all sources."""
        return {f"{p}{name}": s for p, part in self.parts for name, s in part.shapes().items()}

    @once
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Of all sources."""
        return {f"{p}{name}": d for p, part in self.parts for name, d in part.dtypes().items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """From the source that contains it."""
        part, inner = self._places[name]
        return part.read(inner, box)
