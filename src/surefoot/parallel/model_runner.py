"""Run a window through a model. All runners have one interface, so the training loop does not
depend on the kind.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..batch import Batch, Loss, LossFunction, Outputs, StepRunner, Window

Forward = Callable[[Batch], Outputs]


def plain(forward: Forward, device: torch.device) -> StepRunner:
    """One micro-batch after another, on a model that this rank has in full."""

    def run(
        window: Window,
        loss_function: LossFunction,
        *,
        before: Callable[[int], None],
        after: Callable[[int], None],
    ) -> list[Loss]:
        losses = []
        for index, batch in enumerate(window):
            before(index)
            here = batch.to(device)
            loss = loss_function(forward(here), here)
            loss.total.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            after(index)
        return losses

    return run
