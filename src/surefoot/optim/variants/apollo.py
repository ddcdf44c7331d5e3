"""APOLLO (arXiv:2412.05270): Adam's step sizes, estimated from moments of a random projection of
the gradient.

The projection is a function of the seed, the parameter's name and the number of its update: nothing
to save.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..learning_rate import LearningRate, check_learning_rate, check_shares, schedule_of
from ..optimizer import SCALAR, StateTensor
from ..projected_state import large_dim, small_dim, state_of_rank
from ..rules import modules as rules
from ..update_rule import build_from_rule

if TYPE_CHECKING:
    import torch

    from ..rules.rule_optimizer import Update

GROWTH = 1.01  # of the norm of an update, at most (Fira, arXiv:2410.01623)


@dataclass(frozen=True, kw_only=True)
class Apollo(LearningRate):
    """Adam with moments of a random projection, for the matrices inside layers (arXiv:2412.05270);
    AdamW for all else. APOLLO-Mini is ``{rank: 1, scaling: tensor, scale: 128}``."""

    schedule_over = schedule_of
    build = build_from_rule

    weight_decay: float = 0.0
    """Decay of matrices per step, times the learning rate."""
    rank: int = 128
    """Rank of the projection; a quarter of the hidden size in the paper."""
    scaling: Literal["channel", "tensor"] = "channel"
    """One step size for each row or column of a matrix, or one for the matrix."""
    scale: float = 1.0
    """The update is multiplied by its root: 1 with ``channel``, 128 with rank 1 and ``tensor``."""
    update_gap: int = 200
    """Steps with one projection."""
    seed: int = 0
    """Of the projections."""
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
        """Moments in low rank, and the norm of the last update."""
        return state_of_rank(self.rank, update_norm=SCALAR)

    def update(self, update: Update) -> None:
        """Update one parameter."""
        if not update.layout.is_matrix:
            update.adamw(self.beta1, self.beta2, self.epsilon)
            return
        low = rules.projection.project(update, self.projector(update))
        direction = rules.projection.adam_direction(
            update, low, self.beta1, self.beta2, self.epsilon
        )
        scaled = update.grad * self.ratio(direction, low, update)
        scaled = scaled * self.limit(scaled, update)
        update.decay()
        rate = rules.projection.corrected_rate(update, self.beta1, self.beta2) * self.scale**0.5
        update.value.sub_(scaled, alpha=rate)

    def projector(self, update: Update) -> torch.Tensor:
        """This rank's part of the projector of this update."""
        text = f"{self.seed} {(update.number - 1) // self.update_gap} {update.name}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
        return rules.projection.random_projector(update.parameter, self.rank, seed)

    def ratio(self, direction: torch.Tensor, low: torch.Tensor, update: Update) -> torch.Tensor:
        """Adam's step size over the gradient, for each row or column, or for the matrix."""
        shape = tuple(update.parameter.shape)
        squares = [one.square().sum(small_dim(shape), keepdim=True) for one in (direction, low)]
        if self.scaling == "tensor":
            at = large_dim(shape)
            whole = [one.sum(at, keepdim=True) for one in squares]
            squares = [update.add_over_shards(one, {at}) for one in whole]
        return squares[0].sqrt() / (squares[1].sqrt() + 1e-8)

    def limit(self, scaled: torch.Tensor, update: Update) -> torch.Tensor:
        """The factor with which the norm of the update grows by 1 % at most."""
        dims = range(scaled.ndim)
        norm = update.add_over_shards(scaled.float().square().sum(), dims).sqrt()
        last = update.tensor("update_norm")
        factor = GROWTH / (norm / (last + 1e-8)).clamp(min=GROWTH)
        if update.number == 1:
            factor = norm.new_ones(())
        last.copy_(norm * factor)
        return factor

    def trainer_arguments(self) -> dict[str, object]:
        """Its settings under the names of ``TrainingArguments``."""
        betas = {"adam_beta1": self.beta1, "adam_beta2": self.beta2, "adam_epsilon": self.epsilon}
        return {"optim": "apollo_adamw", "weight_decay": self.weight_decay, **betas}
