"""AdEMAMix (arXiv:2409.03137): AdamW with a second, very slow average of gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...schema import must
from ..state_tensor import LIKE_PARAMETER, SCALAR, StateTensor
from .adamw import Adam

if TYPE_CHECKING:
    from .._rules.rule_optimizer import Update


@dataclass(frozen=True, kw_only=True)
class AdEMAMix(Adam):
    """AdamW whose update also has an average over thousands of gradients (arXiv:2409.03137)."""

    is_entrywise: ClassVar[bool] = True
    state_tensors: ClassVar[Mapping[str, StateTensor]] = {
        "step": SCALAR,
        "exp_avg": LIKE_PARAMETER,
        "exp_avg_slow": LIKE_PARAMETER,
        "exp_avg_sq": LIKE_PARAMETER,
    }

    beta1: float = 0.9
    """Decay of the fast average."""
    beta3: float = 0.9999
    """Decay of the slow average."""
    alpha: float = 5.0
    """Weight of the slow average."""
    ramp_steps: int | None = None
    """Steps in which ``alpha`` rises from 0 and ``beta3`` from ``beta1``; in the paper, all
    steps of the run. Unset: both are constant."""

    def __post_init__(self) -> None:
        super().__post_init__()
        must(self, "be in [0, 1)", "beta3")
        must(self, "not be negative", "alpha")
        must(self, "be at least 1", "ramp_steps")
        if self.ramp_steps is not None and not 0 < self.beta1 <= self.beta3:
            raise ValueError(f"beta1 must be in (0, beta3] to ramp up, got {self.beta1}")

    def update(self, update: Update) -> None:
        """Update one parameter."""
        update.decay()
        grad, number = update.grad, update.number
        fast, slow = update.tensor("exp_avg"), update.tensor("exp_avg_slow")
        square = update.tensor("exp_avg_sq")
        alpha, beta3 = self.ramp(number)
        fast.lerp_(grad, 1 - self.beta1)
        slow.lerp_(grad, 1 - beta3)
        square.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        root = (square.sqrt() / (1 - self.beta2**number) ** 0.5).add_(self.epsilon)
        direction = (fast / (1 - self.beta1**number)).add_(slow, alpha=alpha)
        update.value.addcdiv_(direction, root, value=-update.rate)

    def ramp(self, number: int) -> tuple[float, float]:
        """``alpha`` and ``beta3`` of an update (from 1): beta3's half-life rises linearly."""
        if self.ramp_steps is None or number >= self.ramp_steps:
            return self.alpha, self.beta3
        share = number / self.ramp_steps
        first, last = math.log(self.beta1), math.log(self.beta3)
        return share * self.alpha, math.exp(first * last / ((1 - share) * last + share * first))
