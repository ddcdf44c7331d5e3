"""Lion (arXiv:2302.06675): the sign of an interpolated momentum; half of AdamW's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..learning_rate import LearningRate, check_learning_rate, check_shares, schedule_of
from ..optimizer import LIKE_PARAMETER, SCALAR, StateTensor
from ..update_rule import build_from_rule

if TYPE_CHECKING:
    from ..rules.rule_optimizer import Update


@dataclass(frozen=True, kw_only=True)
class Lion(LearningRate):
    """Sign of the momentum (arXiv:2302.06675). Its learning rate is 3 to 10 times smaller than
    AdamW's, its weight decay as much larger."""

    is_entrywise: ClassVar[bool] = True
    state_tensors: ClassVar[Mapping[str, StateTensor]] = {
        "step": SCALAR,
        "exp_avg": LIKE_PARAMETER,
    }

    schedule_over = schedule_of
    build = build_from_rule

    weight_decay: float = 0.0
    """Decay of matrices per step, times the learning rate."""
    beta1: float = 0.9
    """Share of the momentum in an update."""
    beta2: float = 0.99
    """Decay of the momentum."""

    def __post_init__(self) -> None:
        check_learning_rate(self)
        check_shares(self, "beta1", "beta2")

    def update(self, update: Update) -> None:
        """Update one parameter."""
        update.decay()
        grad, mean = update.grad, update.tensor("exp_avg")
        update.value.add_(mean.lerp(grad, 1 - self.beta1).sign_(), alpha=-update.rate)
        mean.lerp_(grad, 1 - self.beta2)

    def trainer_arguments(self) -> dict[str, object]:
        """Its settings under the names of ``TrainingArguments``."""
        betas = {"adam_beta1": self.beta1, "adam_beta2": self.beta2}
        return {"optim": "lion_32bit", "weight_decay": self.weight_decay, **betas}
