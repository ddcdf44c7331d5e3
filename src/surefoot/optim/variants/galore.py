"""GaLore (arXiv:2403.03507): Adam in the space of the gradient's largest singular vectors.

The projector is a tensor of the state. A sharded gradient is gathered when the projector is
replaced, and at no other step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..learning_rate import LearningRate, check_learning_rate, check_shares, schedule_of
from ..optimizer import StateTensor
from ..projected_state import projector_of_rank, state_of_rank
from ..rules import modules as rules
from ..update_rule import build_from_rule

if TYPE_CHECKING:
    from ..rules.rule_optimizer import Update


@dataclass(frozen=True, kw_only=True)
class GaLore(LearningRate):
    """Adam in a low-rank space of the gradient, for the matrices inside layers (arXiv:2403.03507);
    AdamW for all else."""

    schedule_over = schedule_of
    build = build_from_rule

    weight_decay: float = 0.0
    """Decay of matrices per step, times the learning rate."""
    rank: int = 128
    """Rank of the space; a quarter of the hidden size in the paper."""
    scale: float = 0.25
    """Factor of the update of matrices."""
    update_gap: int = 200
    """Steps in one space. A new one costs a singular value decomposition of every matrix."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""

    def __post_init__(self) -> None:
        check_learning_rate(self)
        check_shares(self, "beta1", "beta2")
        for name in ("rank", "update_gap"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.scale <= 0:
            raise ValueError(f"scale must be positive, got {self.scale}")

    @property
    def state_tensors(self) -> Mapping[str, StateTensor]:
        """Moments in low rank, and the projector."""
        return state_of_rank(self.rank, projector=projector_of_rank(self.rank))

    def update(self, update: Update) -> None:
        """Update one parameter."""
        if not update.layout.is_matrix:
            update.adamw(self.beta1, self.beta2, self.epsilon)
            return
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

    def trainer_arguments(self) -> dict[str, object]:
        """Its settings under the names of ``TrainingArguments``."""
        betas = {"adam_beta1": self.beta1, "adam_beta2": self.beta2, "adam_epsilon": self.epsilon}
        return {"optim": "galore_adamw", "weight_decay": self.weight_decay, **betas}
