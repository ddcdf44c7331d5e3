"""Lion (arXiv:2302.06675): the sign of an interpolated momentum; half of AdamW's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...schema import must
from ..optimizer import Optimizer
from ..state_tensor import LIKE_PARAMETER, SCALAR, StateTensor

if TYPE_CHECKING:
    from .._rules.rule_optimizer import Update


@dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """Sign of the momentum (arXiv:2302.06675). Its learning rate is 3 to 10 times smaller than
    AdamW's, its weight decay as much larger."""

    is_entrywise: ClassVar[bool] = True
    state_tensors: ClassVar[Mapping[str, StateTensor]] = {
        "step": SCALAR,
        "exp_avg": LIKE_PARAMETER,
    }

    beta1: float = 0.9
    """Share of the momentum in an update."""
    beta2: float = 0.99
    """Decay of the momentum."""

    def __post_init__(self) -> None:
        super().__post_init__()
        must(self, "be in [0, 1)", "beta1", "beta2")

    def update(self, update: Update) -> None:
        """Update one parameter."""
        update.decay()
        grad, mean = update.grad, update.tensor("exp_avg")
        # The weight first, with beta1 and a copy; then the momentum, with
        # beta2: two averages of one state.
        update.value.add_(mean.lerp(grad, 1 - self.beta1).sign_(), alpha=-update.rate)
        mean.lerp_(grad, 1 - self.beta2)
