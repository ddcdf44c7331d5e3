"""Adam-mini (arXiv:2406.16793): one second moment for each head of queries and keys, and for each
output of other matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..state_tensor import LIKE_PARAMETER, SCALAR, StateTensor, reduced
from .adamw import Adam

if TYPE_CHECKING:
    import torch

    from .._rules.rule_optimizer import Update


@dataclass(frozen=True, kw_only=True)
class AdamMini(Adam):
    """AdamW with one second moment for each attention head of queries and keys, each row of other
    matrices, each token of embeddings and head, and each vector (arXiv:2406.16793). AdamW's
    learning rates fit."""

    state_tensors: ClassVar[Mapping[str, StateTensor]] = {
        "step": SCALAR,
        "exp_avg": LIKE_PARAMETER,
        "exp_avg_sq": reduced(-1),
    }

    def update(self, update: Update) -> None:
        """Update one parameter."""
        update.decay()
        grad, mean, square = update.grad, update.tensor("exp_avg"), update.tensor("exp_avg_sq")
        mean.lerp_(grad, 1 - self.beta1)
        mean_square = update.mean_over(grad * grad, grad.ndim - 1)
        if update.layout.head_size:
            mean_square = _of_heads(mean_square, update)
        square.lerp_(mean_square, 1 - self.beta2)
        root = (square.sqrt() / (1 - self.beta2**update.number) ** 0.5).add_(self.epsilon)
        update.value.sub_(mean / root, alpha=update.rate / (1 - self.beta1**update.number))


def _of_heads(rows: torch.Tensor, update: Update) -> torch.Tensor:
    """The mean over the rows of each attention head, for each of this rank's ``rows``."""
    # The rows of one head may be on two ranks.
    full = update.gathered_rows(rows)
    heads = full.view(-1, update.layout.head_size).mean(1, keepdim=True)
    spread = heads.repeat_interleave(update.layout.head_size, 0)
    return update.own_rows(spread)
