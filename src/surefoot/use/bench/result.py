"""What a measurement tells. Imports nothing heavy: it is read where nothing is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class BenchResult:
    """Of some optimizer steps; sums are over all of them."""

    device: str
    precision: str
    run_steps: int  # of the whole run
    steps: int  # that were timed
    tokens: int  # padding not counted
    trained_tokens: int
    positions: int  # tokens, padding counted
    flops: float  # of the model, as ``total_flos`` counts them
    gemm_flops: float  # a second: what a product of matrices of this type reaches here
    peak_memory: int  # bytes
    compiling_seconds: float  # by which the first step was longer, if ``model.compile`` is on
    phases: Mapping[str, float]  # seconds
    used: Mapping[str, str] = field(default_factory=dict)  # kernels, dtypes, what a check decided

    @property
    def seconds(self) -> float:
        """All of them."""
        return sum(self.phases.values())

    @property
    def step_seconds(self) -> float:
        """Of one step, in the mean."""
        return self.seconds / self.steps

    @property
    def tokens_per_second(self) -> float:
        """Read."""
        return self.tokens / self.seconds

    @property
    def trained_tokens_per_second(self) -> float:
        """Learnt."""
        return self.trained_tokens / self.seconds

    @property
    def padding(self) -> float:
        """Share of the positions that hold no token."""
        return 1 - self.tokens / self.positions

    @property
    def utilisation(self) -> float:
        """Model FLOPs a second, as a share of what the hardware reaches."""
        return self.flops / self.seconds / self.gemm_flops

    @property
    def shares(self) -> dict[str, float]:
        """Of the time, by phase."""
        return {name: spent / self.seconds for name, spent in self.phases.items()}
