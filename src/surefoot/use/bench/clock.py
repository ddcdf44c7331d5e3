"""Where the time goes: each moment belongs to one phase, which lasts until the next begins.

On a GPU a phase begins when the GPU reaches it, not when Python does: an event in its queue records
the time, and nothing waits for it before the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from ...batch import Batch, Hook, Loss, LossFunction, Outputs, StepRunner, Window

PHASES = ("data", "forward", "backward", "optimizer", "rest")  # a step begins with its data

Mark = float | torch.cuda.Event  # seconds, or a place in the queue of a GPU


@dataclass
class Clock:
    """Records when phases begin."""

    device: torch.device
    _begun: list[tuple[str, Mark]] = field(default_factory=list)

    def turn(self, phase: str) -> None:
        """``phase`` begins, and the one before ends."""
        if self.device.type != "cuda":
            self._begun.append((phase, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._begun.append((phase, event))

    def steps(self) -> list[dict[str, float]]:
        """Seconds of each phase, step by step; the last phase is not complete and not counted."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        first = self._begun[0][1]
        return split([(phase, _since(first, mark)) for phase, mark in self._begun])


def _since(first: Mark, mark: Mark) -> float:
    if isinstance(first, float) and isinstance(mark, float):
        return mark - first
    assert not isinstance(first, float)
    assert not isinstance(mark, float)
    return float(first.elapsed_time(mark)) / 1000


def split(begun: Sequence[tuple[str, float]]) -> list[dict[str, float]]:
    """Seconds of each phase, step by step, of the times at which phases began."""
    steps: list[dict[str, float]] = []
    for (phase, start), (_, end) in pairwise(begun):
        if phase == "data":
            steps.append(dict.fromkeys(PHASES, 0.0))
        steps[-1][phase] += end - start
    return steps


def timed(
    run_window: StepRunner, turn: Callable[[str], None], note: Callable[[Window], None]
) -> StepRunner:
    """``run_window`` that records when forward and backward begin. A forward pass ends with its
    loss, a backward pass with its micro-batch; what follows the window, normalizing and clipping
    the gradient, belongs to the optimizer."""

    def run(window: Window, loss_of: LossFunction, *, before: Hook, after: Hook) -> list[Loss]:
        def begin(index: int) -> None:
            before(index)
            turn("forward")

        def timed_loss(outputs: Outputs, batch: Batch) -> Loss:
            loss = loss_of(outputs, batch)
            turn("backward")
            return loss

        def end(index: int) -> None:
            turn("rest")
            after(index)

        note(window)
        losses = run_window(window, timed_loss, before=begin, after=end)
        turn("optimizer")
        return losses

    return run
