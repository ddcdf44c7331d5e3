"""One optimizer step: forward and backward over a window, one normalisation, clipping, the
update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from ..batch import Batch, ForwardBackward, Loss, LossFunction, Outputs, Window
from ..optim.schedules import Schedule
from ..parallel.norm import local, total_norm
from .precision import LossScaler


@dataclass(frozen=True)
class Figures:
    """What a step says about itself. Sums are over the whole window, of all processes."""

    loss: float  # sum
    weight: float  # what it is a sum over
    grad_norm: float  # before clipping
    learning_rate: float
    metrics: dict[str, float]  # sums
    num_tokens: int  # padding not counted

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient are numbers."""
        return all(abs(x) < float("inf") for x in (self.loss, self.grad_norm))  # false for nan too


@dataclass
class Step:
    """The parts of an optimizer step. ``gradients`` runs the window, ``update`` applies the
    result."""

    optimizer: torch.optim.Optimizer
    schedule: Schedule
    run_window: ForwardBackward
    max_grad_norm: float
    scaler: LossScaler
    sums: Callable[[Sequence[float]], list[float]] = list  # over all shares of the examples
    totals: Callable[[Sequence[float]], list[float]] = list  # over all processes
    copies: Collection[torch.Tensor] = frozenset()  # parameters that count in another process

    def gradients(
        self,
        window: Window,
        loss_function: LossFunction,
        *,
        step: int,
        before: Callable[[int], None],
        after: Callable[[int], None],
    ) -> Figures:
        """Leave the normalised, clipped gradient of ``window`` in the parameters.

        The gradient of the summed loss is divided once, by the weight of all micro-batches
        together, so accumulation changes it only by float rounding.
        """
        learning_rate = self._set_learning_rate(step)
        factor = self._factor(window)
        losses = self.run_window(window, _scaled(loss_function, factor), before=before, after=after)
        total = float(torch.stack([loss.total.double() for loss in losses]).sum()) / factor
        weight = float(torch.stack([loss.weight.double() for loss in losses]).sum())
        metrics: dict[str, float] = {}
        for loss in losses:
            for name, value in loss.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + float(value)
        tokens = float(sum(batch.num_tokens for batch in window if batch.num_trained))
        total, weight, tokens, *values = self.sums([total, weight, tokens, *metrics.values()])
        norm = self._normalise(factor * weight)
        metrics = dict(zip(metrics, values, strict=True))
        return Figures(total, weight, norm, learning_rate, metrics, int(tokens))

    def update(self, figures: Figures) -> None:
        """Move the weights, unless the gradient overflowed fp16's range; then only the scale
        learns."""
        overflowed = not figures.is_finite
        if not overflowed:
            self.optimizer.step()
        self.scaler.update(overflowed=overflowed)

    def is_usable(self, figures: Figures) -> bool:
        """Whether to go on: the figures are numbers, or fp16's scale was too high, which heals
        itself."""
        healing = self.scaler.scale > 1.0 and abs(figures.loss) < float("inf")
        return figures.is_finite or healing

    def _set_learning_rate(self, step: int) -> float:
        for group in self.optimizer.param_groups:
            peak = group.setdefault("peak_lr", group["lr"])
            group["lr"] = peak * self.schedule.factor(step)
        return float(self.optimizer.param_groups[0]["lr"])

    def _factor(self, window: Window) -> float:
        """What the loss is multiplied by for the backward pass: 1, but in fp16 the scale per
        trained token.

        A sum over thousands of tokens would overflow fp16 long before the scale is of any use.
        """
        if not self.scaler.enabled:
            return 1.0
        (trained,) = self.sums([sum(batch.num_trained for batch in window)])
        return self.scaler.scale / max(1, trained)

    def _normalise(self, divisor: float) -> float:
        """Divide all gradients, clip them, and return their global norm before clipping."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = {p: p.grad for p in parameters if p.grad is not None}
        here = [local(gradient) for gradient in gradients.values()]
        if here:
            torch._foreach_div_(here, divisor or 1.0)
        norm = total_norm([g for p, g in gradients.items() if p not in self.copies], self.totals)
        if here and self.max_grad_norm > 0:  # as torch.nn.utils.clip_grads_with_norm_
            scale = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(here, scale.to(here[0]))
        return float(norm)


def _scaled(loss_function: LossFunction, factor: float) -> LossFunction:
    if factor == 1.0:
        return loss_function

    def scaled(outputs: Outputs, batch: Batch) -> Loss:
        loss = loss_function(outputs, batch)
        return replace(loss, total=loss.total * factor)

    return scaled
