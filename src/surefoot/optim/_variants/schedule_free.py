"""Schedule-free AdamW (arXiv:2405.15682): an average of the weights takes the schedule's place.

Gradients are of the point y between the steps z and their average x. Evaluations, checkpoints and
generation see x, as the paper asks: the weights are x whenever no gradient is computed, and y is a
function of x and z.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..optimizer import ScheduleName
from ..state_tensor import LIKE_PARAMETER, SCALAR, StateTensor
from .adamw import Adam

if TYPE_CHECKING:
    import torch

    from .._rules.rule_optimizer import Update


@dataclass(frozen=True, kw_only=True)
class ScheduleFree(Adam):
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

    schedule: ScheduleName = "constant"
    """Shape of the learning rate after warmup; anything but ``constant`` defeats the purpose."""
    beta1: float = 0.9
    """Share of the average in the point at which gradients are computed."""

    @property
    def points(self) -> ScheduleFree:
        """Gradients are computed at an average of two points, of which one is saved."""
        return self

    def update(self, update: Update) -> None:
        """Update one parameter, which is y before and x afterwards."""
        grad, rate, z = update.grad, update.rate, update.tensor("z")
        average, square = update.tensor("average"), update.tensor("exp_avg_sq")
        if update.number == 1:
            z.copy_(update.value)
            average.copy_(update.value)
        point = self.point(z, average)
        # The decay is that of y, where the gradient is, as in the authors' package.
        z.sub_(point, alpha=rate * update.group["weight_decay"])
        square.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        root = (square / (1 - self.beta2**update.number)).sqrt_().add_(self.epsilon)
        z.addcdiv_(grad, root, value=-rate)
        largest, total = update.tensor("largest_rate"), update.tensor("weight_sum")
        # Steps weigh as the square of the largest rate so far (`weight_lr_power` 2 of that
        # package), so those of a warmup weigh little.
        largest.clamp_(min=rate)
        total.add_(largest.square())
        # A rate of 0 at first would make 0 / 0.
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
