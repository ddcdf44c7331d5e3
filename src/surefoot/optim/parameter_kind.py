"""What a parameter is in its model, as far as optimizers distinguish parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import RecipeError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ParameterKind:
    """A matrix inside a layer, or all such matrices of a layer's experts; or anything else."""

    is_matrix: bool  # False: embeddings, head, norms, biases, routers, adapters
    parts: tuple[int, ...] = ()  # outputs of the matrices that are fused in it, in order
    head_size: int = 0  # outputs of an attention head, for queries and keys
    is_transposed: bool = False  # outputs are its last dimension, not the one before
    num_groups: int = 1  # of its outputs, each of which has its share of every part, in order
    is_unknown: bool = False  # queries, keys and values are fused in it, in an unknown order

    def matrices(self, by_outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of its matrices, in groups of outputs: ``(experts,) groups, outputs, inputs``."""
        *experts, outputs, inputs = by_outputs.shape
        each = outputs // self.num_groups
        groups = by_outputs.view(*experts, self.num_groups, each, inputs)
        sizes = [size // self.num_groups for size in self.parts]
        found: tuple[torch.Tensor, ...] = groups.split(sizes or each, -2)  # type: ignore[no-untyped-call]
        return found


ParameterKinds = Mapping[str, ParameterKind]  # by the names of parameters in files
OTHER = ParameterKind(is_matrix=False)


def check_kinds(optim: object, kinds: ParameterKinds) -> None:
    """Raise ``RecipeError`` if ``optim`` must know what is fused in a parameter that is unknown."""
    for name, kind in kinds.items() if getattr(optim, "splits_matrices", False) else ():
        if kind.is_unknown:
            raise RecipeError(
                f"optim: {type(optim).__name__} updates queries, keys and values one by one; how "
                f"they are fused in {name} is not known of this architecture; use another optimizer"
            )


def layout_of(name: str, num_dims: int, layouts: ParameterKinds) -> ParameterKind:
    """The layout of the parameter ``name``. Without a model, whatever has rows is a matrix."""
    if layouts:
        return layouts.get(name, OTHER)
    return ParameterKind(is_matrix=num_dims >= 2)
