"""Schedule-free AdamW (arXiv:2405.15682): an average of the weights takes the schedule's place.

Gradients are of the point y between the steps z and their average x. Evaluations, checkpoints and
generation see x, as the paper asks: the weights are x whenever no gradient is computed, and y is a
function of x and z.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..groups import Named, parameter_groups
from ..learning_rate import LearningRate, check_learning_rate, check_shares, schedule_of
from ..optimizer import LIKE_PARAMETER, SCALAR, StateTensor
from ..parameter_kind import ParameterKinds
from ..rules import modules as rules
from ..schedules import ScheduleName

if TYPE_CHECKING:
    import torch

    from ..rules.rule_optimizer import Update


@dataclass(frozen=True, kw_only=True)
class ScheduleFree(LearningRate):
    """AdamW that averages its weights and needs no decay of the learning rate (arXiv:2405.15682).
    Evaluations and checkpoints are of the average."""

    state_tensors: ClassVar[Mapping[str, StateTensor]] = {
        "step": SCALAR,
        "z": LIKE_PARAMETER,
        "average": LIKE_PARAMETER,
        "exp_avg_sq": LIKE_PARAMETER,
        "weight_sum": SCALAR,
        "largest_rate": SCALAR,
    }

    schedule_over = schedule_of

    schedule: ScheduleName = "constant"
    """Shape of the learning rate after warmup; anything but ``constant`` defeats the purpose."""
    weight_decay: float = 0.0
    """Decay of matrices per step, times the learning rate."""
    beta1: float = 0.9
    """Share of the average in the point at which gradients are computed."""
    beta2: float = 0.999
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""

    def __post_init__(self) -> None:
        check_learning_rate(self)
        check_shares(self, "beta1", "beta2")

    def build(self, named: Named, layouts: ParameterKinds | None = None) -> torch.optim.Optimizer:
        """The optimizer over ``named`` parameters; every group carries their ``names``."""
        groups = parameter_groups(named, self, self.weight_decay)
        rule = rules.rule_optimizer.one_by_one(self.update)
        return rules.rule_optimizer.build(self, groups, rule, layouts, points=self)

    def update(self, update: Update) -> None:
        """Update one parameter, which is y before and x afterwards."""
        grad, rate, z = update.grad, update.rate, update.tensor("z")
        average, square = update.tensor("average"), update.tensor("exp_avg_sq")
        if update.number == 1:
            z.copy_(update.value)
            average.copy_(update.value)
        point = self.point(z, average)
        z.sub_(point, alpha=rate * update.group["weight_decay"])
        square.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        root = (square / (1 - self.beta2**update.number)).sqrt_().add_(self.epsilon)
        z.addcdiv_(grad, root, value=-rate)
        largest, total = update.tensor("largest_rate"), update.tensor("weight_sum")
        largest.clamp_(min=rate)
        total.add_(largest.square())
        share = (largest.square() / total.clamp(min=1e-30)).to(average)
        average.lerp_(z, share)
        update.value.copy_(average)

    def point(self, z: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
        """Where gradients are computed: y."""
        return average.lerp(z, 1 - self.beta1)

    def for_gradients(self, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weights of a forward and backward pass."""
        return self.point(state["z"], state["average"])

    def at_rest(self, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weights of evaluations and checkpoints."""
        return state["average"]

    def trainer_arguments(self) -> dict[str, object]:
        """Its settings under the names of ``TrainingArguments``."""
        betas = {"adam_beta1": self.beta1, "adam_beta2": self.beta2, "adam_epsilon": self.epsilon}
        return {"optim": "schedule_free_adamw", "weight_decay": self.weight_decay, **betas}
