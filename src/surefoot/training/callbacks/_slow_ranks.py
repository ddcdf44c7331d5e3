"""Names a rank for which the others wait: what takes its time, and how much of a step."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from ...parallel.world import World
from ..arguments import Context
from ..callback import Metrics, TrainerCallback, TrainerControl, TrainerState
from .launches import LaunchFiles

logger = logging.getLogger(__name__)
LEAST_SHARE = 0.2  # of a step for which the others wait
LEAST_SECONDS = 5.0  # of training, between two looks
WHAT = ("data", "compute")


@dataclass
class SlowRanks(TrainerCallback):
    """Compares the ranks at every log. Ranks that wait for others use no processor, so that a slow
    one stands out by its own seconds; of a GPU, only those of its data are known."""

    world: World
    folder: Path  # of the run, whose record of launches gets the rank, for the board
    _last: tuple[float, float, float] = field(default=(0.0, 0.0, 0.0), init=False)
    _sums: torch.Tensor | None = field(default=None, init=False)  # [ranks, 3] since the last look
    _named: tuple[int, str] | None = field(default=None, init=False)

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
        slow, self._sums = slow_rank(self._sums.numpy()), None
        named = None if slow is None else (slow.rank, slow.what)
        if slow is not None and named != self._named:  # not at every log
            logger.warning("%s", slow)
            LaunchFiles(self.folder).slow_rank(step=state.global_step, **asdict(slow))
        self._named = named


@dataclass(frozen=True)
class SlowRank:
    """A rank for which the others wait. Shares are of the mean time of a step."""

    rank: int
    what: str  # it takes longer for: of ``WHAT``
    share: float  # that it needs for that
    share_of_others: float  # that the median of the other ranks needs for that
    waited: float  # of the step, that the others wait for it

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow in {self.what}: {self.share:.0%} of its step, "
            f"{self.share_of_others:.0%} on the other ranks, which wait for it {self.waited:.0%} "
            "of the step"
        )


def slow_rank(seconds: np.ndarray) -> SlowRank | None:
    """Which rank the others wait for, from [ranks, 3] seconds of data, compute, and all of them."""
    own, total = seconds[:, :2], seconds[:, 2].mean()
    slow = int(own.sum(1).argmax())
    median = np.median(np.delete(own, slow, axis=0), axis=0)
    excess = own[slow] - median
    if excess.sum() < LEAST_SHARE * total:
        return None
    what = int(excess.argmax())
    shares = [round(float(s / total), 3) for s in (own[slow, what], median[what], excess.sum())]
    return SlowRank(slow, WHAT[what], *shares)
