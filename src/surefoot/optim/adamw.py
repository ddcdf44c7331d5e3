"""AdamW (arXiv:1711.05101), torch's fused one, with its learning-rate schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .groups import Named, parameter_groups
from .learning_rate import LearningRate, check_learning_rate, check_shares, schedule_of
from .optimizer import LIKE_PARAMETER, SCALAR, StateTensor
from .parameter_kind import ParameterKinds
from .rules import modules as rules

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class AdamW(LearningRate):
    """Adam with decoupled weight decay; decays matrices only, never biases and norms."""

    is_entrywise: ClassVar[bool] = True
    state_tensors: ClassVar[Mapping[str, StateTensor]] = {
        "step": SCALAR,
        "exp_avg": LIKE_PARAMETER,
        "exp_avg_sq": LIKE_PARAMETER,
    }

    schedule_over = schedule_of

    weight_decay: float = 0.0
    """Decay of matrices per step, times the learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""

    def __post_init__(self) -> None:
        check_learning_rate(self)
        check_shares(self, "beta1", "beta2")

    def build(self, named: Named, layouts: ParameterKinds | None = None) -> torch.optim.Optimizer:
        """The optimizer over ``named`` parameters; every group carries their ``names``."""
        return rules.fused_adamw.FusedAdamW(
            parameter_groups(named, self, self.weight_decay),
            lr=self.learning_rate,
            betas=(self.beta1, self.beta2),
            eps=self.epsilon,
            fused=True,
        )

    def trainer_arguments(self) -> dict[str, object]:
        """Its settings under the names of ``TrainingArguments``."""
        return {
            "weight_decay": self.weight_decay,
            "adam_beta1": self.beta1,
            "adam_beta2": self.beta2,
            "adam_epsilon": self.epsilon,
        }
