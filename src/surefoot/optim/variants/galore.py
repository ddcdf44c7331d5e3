"""GaLore (arXiv:2403.03507): Adam in the space of the gradient's largest singular vectors.

The projector is a tensor of the state. A sharded gradient is gathered when the projector is
replaced, and at no other step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...schema import must
from ..adamw import Adam
from ..rules import modules as rules
from ..state_tensor import StateTensor, projector_of_rank, state_of_rank

if TYPE_CHECKING:
    from ..rules.rule_optimizer import Update


@dataclass(frozen=True, kw_only=True)
class LowRank(Adam):
    """Adam with moments of gradients that are projected to a low rank."""

    rank: int = 128
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
        projector = update.tensor("projector")
        if (update.number - 1) % self.update_gap == 0:
            projector.copy_(rules.projection.singular_vectors(update, self.rank))
        low = rules.projection.project(update, projector)
        direction = rules.projection.adam_direction(
            update, low, self.beta1, self.beta2, self.epsilon
        )
        update.decay()
        rate = rules.projection.corrected_rate(update, self.beta1, self.beta2) * self.scale
        update.value.sub_(rules.projection.project_back(direction, projector, update), alpha=rate)
