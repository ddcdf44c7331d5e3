"""Names a rank for which the others wait: what takes its time, and how much of a step."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import torch

from ...parallel.world import World
from ..callback import Context, Metrics, TrainerCallback, TrainerControl, TrainerState

logger = logging.getLogger(__name__)
LEAST_SHARE = 0.2  # of a step for which the others wait
LEAST_SECONDS = 5.0  # of training, between two looks
WHAT = ("data", "compute")


@dataclass
class SlowRanks(TrainerCallback):
    """Compares the ranks at every log. Ranks that wait for others use no processor, so that a slow
    one stands out by its own seconds; of a GPU, only those of its data are known."""

    world: World
    _last: tuple[float, float, float] = field(default=(0.0, 0.0, 0.0), init=False)
    _sums: torch.Tensor | None = field(default=None, init=False)  # [ranks, 3] since the last look
    _named: str = field(default="", init=False)

    def on_log(
        self, args: Context, state: TrainerState, control: TrainerControl, logs: Metrics
    ) -> None:
        """Gather the seconds of each rank since the last log, and warn of a slow one."""
        if "loss" not in logs:
            return
        data, compute, both = self.world.progress.spent
        # A thread that waits for a GPU may use the processor all the time.
        spent = data, 0.0 if torch.cuda.is_available() else compute, both
        seconds = torch.zeros(self.world.size, 3, dtype=torch.float64)
        seconds[self.world.rank] = torch.tensor(spent) - torch.tensor(self._last)
        self._last = spent
        seconds = self.world.totals(seconds)
        self._sums = seconds if self._sums is None else self._sums + seconds
        if not self.world.is_main or float(self._sums[:, 2].mean()) < LEAST_SECONDS:
            return
        message, self._sums = slow_rank(self._sums.numpy()), None
        subject = (message or "").partition(":")[0]
        if message is not None and subject != self._named:  # not at every log
            logger.warning("%s", message)
        self._named = subject


def slow_rank(seconds: np.ndarray) -> str | None:
    """Which rank the others wait for, from [ranks, 3] seconds of data, compute, and all of them."""
    own, total = seconds[:, :2], seconds[:, 2].mean()
    slow = int(own.sum(1).argmax())
    median = np.median(np.delete(own, slow, axis=0), axis=0)
    excess = own[slow] - median
    if excess.sum() < LEAST_SHARE * total:
        return None
    what = int(excess.argmax())
    shares = own[slow, what] / total, median[what] / total, excess.sum() / total
    return (
        f"rank {slow} is slow in {WHAT[what]}: {shares[0]:.0%} of its step, {shares[1]:.0%} on the "
        f"other ranks, which wait for it {shares[2]:.0%} of the step"
    )
