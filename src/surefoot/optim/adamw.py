"""AdamW (arXiv:1711.05101), torch's fused one, and the settings of all that have Adam's moments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..schema import must
from .groups import Named
from .optimizer import Optimizer
from .parameter_kind import ParameterKinds
from .rules import modules as rules
from .state_tensor import LIKE_PARAMETER, SCALAR, StateTensor

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """What optimizers with Adam's moments have in common."""

    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""

    def __post_init__(self) -> None:
        super().__post_init__()
        must(self, "be in [0, 1)", "beta1", "beta2")
        must(self, "be positive", "epsilon")


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay; decays matrices only, never biases and norms."""

    is_entrywise: ClassVar[bool] = True
    state_tensors: ClassVar[Mapping[str, StateTensor]] = {
        "step": SCALAR,
        "exp_avg": LIKE_PARAMETER,
        "exp_avg_sq": LIKE_PARAMETER,
    }

    def build(self, named: Named, layouts: ParameterKinds | None = None) -> torch.optim.Optimizer:
        """Torch's own, with its fused kernel."""
        return rules.fused_adamw.FusedAdamW(
            self.groups(named, layouts or {}),
            lr=self.learning_rate,
            betas=(self.beta1, self.beta2),
            eps=self.epsilon,
            fused=True,
        )
