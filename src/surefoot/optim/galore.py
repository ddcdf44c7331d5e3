"""GaLore (arXiv:2403.03507): Adam in the space of the gradient's largest singular vectors.

The projector is a tensor of the state. A sharded gradient is gathered when the projector is made
anew, and never else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .groups import Named, parameter_groups
from .layout import Layouts
from .learning_rate import LearningRate, check_learning_rate, check_shares, schedule_of
from .optimizer import StateTensor

if TYPE_CHECKING:
    import torch

    from .rules.rule import Update


@dataclass(frozen=True, kw_only=True)
class GaLore(LearningRate):
    """Adam in a low-rank space of the gradient, for the matrices inside layers (arXiv:2403.03507);
    AdamW for all else."""

    schedule_over = schedule_of

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
        from .rules.low_rank import projector_of_rank, state_of_rank

        return state_of_rank(self.rank, projector=projector_of_rank(self.rank))

    def build(self, named: Named, layouts: Layouts | None = None) -> torch.optim.Optimizer:
        """The optimizer over ``named`` parameters; every group carries their ``names``."""
        from .rules.rule import Rule

        groups = parameter_groups(named, self, self.weight_decay)
        return Rule(groups, self.update, self.state_tensors, layouts or {}, self.learning_rate)

    def update(self, update: Update) -> None:
        """Update one parameter."""
        from .rules.low_rank import adam_direction, corrected_rate, project, project_back
        from .rules.rule import adamw

        if not update.layout.is_matrix:
            adamw(update, self.beta1, self.beta2, self.epsilon)
            return
        projector = update.tensor("projector")
        if (update.number - 1) % self.update_gap == 0:
            projector.copy_(self.singular_vectors(update))
        low = project(update, projector)
        direction = adam_direction(update, low, self.beta1, self.beta2, self.epsilon)
        update.decay()
        rate = corrected_rate(update, self.beta1, self.beta2) * self.scale
        update.value.sub_(project_back(direction, projector, update), alpha=rate)

    def singular_vectors(self, update: Update) -> torch.Tensor:
        """This rank's part of the projector: the gradient's first singular vectors, on the side of
        the smaller dimension."""
        import torch

        from .rules.low_rank import small_dim
        from .rules.sharded import complete, part_of

        own = update.parameter
        full = complete(update.grad, own)
        is_narrow = full.dtype.itemsize < 4
        left, _, right = torch.linalg.svd(full.float() if is_narrow else full, full_matrices=False)
        is_right = own.shape[-2] >= own.shape[-1]
        found = right[..., : self.rank, :] if is_right else left[..., : self.rank]
        kept = {*range(own.ndim - 2), small_dim(tuple(own.shape))}
        return part_of(found.contiguous(), own, kept)

    def trainer_arguments(self) -> dict[str, object]:
        """Its settings under the names of ``TrainingArguments``."""
        betas = {"adam_beta1": self.beta1, "adam_beta2": self.beta2, "adam_epsilon": self.epsilon}
        return {"optim": "galore_adamw", "weight_decay": self.weight_decay, **betas}
