"""Adafactor (arXiv:1804.04235): the second moment of a matrix as row and column means, and no
first moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ...schema import must
from ..optimizer import Optimizer
from ..state_tensor import LIKE_PARAMETER, SCALAR, StateTensor, reduced

if TYPE_CHECKING:
    import torch

    from .._rules.rule_optimizer import Update


def _of_dims(declared: StateTensor, *, is_vector: bool) -> StateTensor:
    return replace(declared, belongs_to=lambda shape, _: (len(shape) < 2) == is_vector)


@dataclass(frozen=True, kw_only=True)
class Adafactor(Optimizer):
    """Factored second moments (arXiv:1804.04235), as in torch.optim.Adafactor: the state of an
    m x n matrix is m + n numbers."""

    state_tensors: ClassVar[Mapping[str, StateTensor]] = {
        "step": SCALAR,
        "row_var": _of_dims(reduced(-1), is_vector=False),
        "col_var": _of_dims(reduced(-2), is_vector=False),
        "variance": _of_dims(LIKE_PARAMETER, is_vector=True),
    }

    beta2_decay: float = -0.8
    """The second moment forgets a share ``step ** beta2_decay`` at each step."""
    max_update_rms: float = 1.0
    """Updates with a larger root mean square are scaled down to it."""
    min_scale: float = 1e-3
    """The learning rate is relative to the root mean square of the weight, which counts as at least
    so much."""

    def __post_init__(self) -> None:
        super().__post_init__()
        must(self, "be positive", "max_update_rms", "min_scale")
        if self.beta2_decay > 0:
            raise ValueError(f"beta2_decay must not be positive, got {self.beta2_decay}")

    def update(self, update: Update) -> None:
        """Update one parameter."""
        value = update.value
        scale = update.mean_square(value).sqrt().clamp(min=self.min_scale)
        update.decay()
        least = update.precision
        # Squared, since the root comes after it, as in torch.optim.Adafactor.
        variance = self.second_moment(update, least).clamp_(min=least * least)
        change = variance.rsqrt_().mul_(update.grad)
        rms = update.mean_square(change).sqrt()
        # The relative step of the paper: no larger than 1 / sqrt(step), in
        # units of the weight's own size.
        factor = min(update.rate, update.number**-0.5) * scale
        value.sub_(change * (factor / (rms / self.max_update_rms).clamp(min=1.0)))

    def second_moment(self, update: Update, least: float) -> torch.Tensor:
        """The estimated second moment of this rank's part of the gradient."""
        grad = update.grad
        forget = update.number**self.beta2_decay
        if grad.ndim < 2:
            # A copy: the caller computes with it in place.
            return update.tensor("variance").lerp_(grad * grad, forget).clone()
        rows, columns = update.tensor("row_var"), update.tensor("col_var")
        last = grad.ndim - 1
        squares = grad * grad
        rows.lerp_(update.mean_over(squares, last), forget)
        columns.lerp_(update.mean_over(squares, last - 1), forget)
        return (rows @ columns) / update.mean_over(rows, last - 1).clamp_(min=least)
