"""Mean and variance of a stream of numbers, kept from window to window."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class RunningMoments:
    """Count, mean and sum of squared differences from the mean, of all numbers so far."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def added(self, values: Sequence[float]) -> RunningMoments:
        """With more numbers (Chan, Golub and LeVeque, 1979)."""
        if not values:
            return self
        mean = math.fsum(values) / len(values)
        squares = math.fsum((value - mean) ** 2 for value in values)
        count, apart = self.count + len(values), mean - self.mean
        return RunningMoments(
            count,
            self.mean + apart * len(values) / count,
            self.squares + squares + apart**2 * self.count * len(values) / count,
        )

    @property
    def deviation(self) -> float:
        """The standard deviation, with Bessel's correction; 0 of fewer than two numbers."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def state(self) -> dict[str, float]:
        """What ``of`` reads."""
        return {f"score_{name}": value for name, value in asdict(self).items()}

    @classmethod
    def of(cls, state: Mapping[str, float]) -> RunningMoments:
        """Those of a state; of no numbers, if it has none."""
        names = ("count", "mean", "squares")
        return cls(*(state.get(f"score_{name}", 0.0) for name in names))
