"""What a parameter is in its model, as far as optimizers distinguish parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class ParameterKind:
    """A matrix inside a layer, or all such matrices of a layer's experts; or anything else."""

    is_matrix: bool  # False: embeddings, head, norms, biases, routers, adapters
    parts: tuple[int, ...] = ()  # outputs of the matrices that are fused in it, in order
    head_size: int = 0  # outputs of an attention head, for queries and keys
    is_transposed: bool = False  # outputs are its last dimension, not the one before
    is_interleaved: bool = False  # outputs of the parts alternate

    def slices(self, outputs: int) -> list[slice]:
        """The outputs of each of its matrices."""
        if not self.parts:
            return [slice(0, outputs)]
        if self.is_interleaved:
            return [slice(start, None, len(self.parts)) for start in range(len(self.parts))]
        stops = [*accumulate(self.parts)]
        return [slice(stop - size, stop) for stop, size in zip(stops, self.parts, strict=True)]


ParameterKinds = Mapping[str, ParameterKind]  # by the names of parameters in files
OTHER = ParameterKind(is_matrix=False)


def layout_of(name: str, num_dims: int, layouts: ParameterKinds) -> ParameterKind:
    """The layout of the parameter ``name``. Without a model, whatever has rows is a matrix."""
    if layouts:
        return layouts.get(name, OTHER)
    return ParameterKind(is_matrix=num_dims >= 2)
