"""GaLore (arXiv:2403.03507) and APOLLO (arXiv:2412.05270): Adam's moments of gradients that are
projected to a low rank.

GaLore's projector, the gradient's largest singular vectors, is a tensor of the state; a sharded
gradient is gathered when it is replaced, and at no other step. APOLLO takes Adam's step sizes from
a random projection, a function of the seed, the parameter's name and the number of its update:
nothing to save.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from ...schema import KEPT, must
from .._rules import modules as rules
from ..state_tensor import (
    SCALAR,
    StateTensor,
    large_dim,
    projector_of_rank,
    small_dim,
    state_of_rank,
)
from .adamw import Adam

if TYPE_CHECKING:
    import torch

    from .._rules.rule_optimizer import Update


@dataclass(frozen=True, kw_only=True)
class LowRank(Adam):
    """Adam with moments of gradients that are projected to a low rank."""

    rank: Annotated[int, KEPT] = 128
    """Rank of the projection; a quarter of the hidden size in the paper."""
    scale: float = 1.0
    """Factor of the update of matrices."""
    update_gap: int = 200
    """Steps with one projection."""

    def __post_init__(self) -> None:
        super().__post_init__()
        must(self, "be at least 1", "rank", "update_gap")
        must(self, "be positive", "scale")

    def update(self, update: Update) -> None:
        """Update one parameter: matrices inside layers in low rank, others as AdamW does."""
        if update.layout.is_matrix:
            self.update_matrix(update)
        else:
            update.adamw(self.beta1, self.beta2, self.epsilon)

    @abstractmethod
    def update_matrix(self, update: Update) -> None:
        """Update one matrix."""


@dataclass(frozen=True, kw_only=True)
class GaLore(LowRank):
    """Adam in a low-rank space of the gradient, for the matrices inside layers (arXiv:2403.03507);
    AdamW for all else."""

    scale: float = 0.25
    """Factor of the update of matrices."""
    update_gap: int = 200
    """Steps in one space. A new one costs a singular value decomposition of every matrix."""

    @property
    def state_tensors(self) -> Mapping[str, StateTensor]:
        """Moments in low rank, and the projector."""
        return state_of_rank(self.rank, projector=projector_of_rank(self.rank))

    def update_matrix(self, update: Update) -> None:
        """Update one matrix."""
        betas, projector = (self.beta1, self.beta2), update.tensor("projector")
        if (update.number - 1) % self.update_gap == 0:  # the only gather of a sharded gradient
            projector.copy_(rules.projection.singular_vectors(update, self.rank))
        low = rules.projection.project(update, projector)
        direction = rules.projection.adam_direction(update, low, *betas, self.epsilon)
        update.decay()
        rate = rules.projection.corrected_rate(update, *betas) * self.scale
        update.value.sub_(rules.projection.project_back(direction, projector, update), alpha=rate)


GROWTH = 1.01  # of the norm of an update, at most (Fira, arXiv:2410.01623)


@dataclass(frozen=True, kw_only=True)
class Apollo(LowRank):
    """Adam with moments of a random projection, for the matrices inside layers (arXiv:2412.05270);
    AdamW for all else. APOLLO-Mini is ``{rank: 1, scaling: tensor, scale: 128}``."""

    scaling: Literal["channel", "tensor"] = "channel"
    """One step size for each row or column of a matrix, or one for the matrix."""
    scale: float = 1.0
    """The update is multiplied by its root: 1 with ``channel``, 128 with rank 1 and ``tensor``."""
    update_gap: Annotated[int, KEPT] = 200
    """Steps with one projection."""
    seed: Annotated[int, KEPT] = 0
    """Of the projections."""

    @property
    def state_tensors(self) -> Mapping[str, StateTensor]:
        """Moments in low rank, and the norm of the last update."""
        return state_of_rank(self.rank, update_norm=SCALAR)

    def update_matrix(self, update: Update) -> None:
        """Update one matrix."""
        betas = self.beta1, self.beta2
        low = rules.projection.project(update, self.projector(update))
        direction = rules.projection.adam_direction(update, low, *betas, self.epsilon)
        scaled = update.grad * self.ratio(direction, low, update)
        scaled = scaled * self.limit(scaled, update)
        update.decay()
        rate = rules.projection.corrected_rate(update, *betas) * self.scale**0.5
        update.value.sub_(scaled, alpha=rate)

    def projector(self, update: Update) -> torch.Tensor:
        """This rank's part of the projector of this update."""
        # Drawn again at each update instead of kept: a projector in the state would have to be
        # saved, and sharded again on another mesh.
        text = f"{self.seed} {(update.number - 1) // self.update_gap} {update.name}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
        return rules.projection.random_projector(update.parameter, self.rank, seed)

    def ratio(self, direction: torch.Tensor, low: torch.Tensor, update: Update) -> torch.Tensor:
        """Adam's step size over the gradient, for each row or column, or for the matrix."""
        shape = tuple(update.parameter.shape)
        small = small_dim(shape)
        squares = [step.square().sum(small, keepdim=True) for step in (direction, low)]
        if self.scaling == "tensor":
            at = large_dim(shape)
            part_sums = [square.sum(at, keepdim=True) for square in squares]
            squares = [update.add_over_shards(part_sum, {at}) for part_sum in part_sums]
        return squares[0].sqrt() / (squares[1].sqrt() + 1e-8)

    def limit(self, scaled: torch.Tensor, update: Update) -> torch.Tensor:
        """The factor with which the norm of the update grows by 1 % at most."""
        dims = range(scaled.ndim)
        norm = update.add_over_shards(scaled.float().square().sum(), dims).sqrt()
        last = update.tensor("update_norm")
        factor = GROWTH / (norm / (last + 1e-8)).clamp(min=GROWTH)
        # There is no update before the first that could bound it.
        if update.number == 1:
            factor = norm.new_ones(())
        last.copy_(norm * factor)
        return factor
