"""An artefact's loss and greedy tokens on the probes beside the checkpoint's, with a bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .probes import ProbeOutputs
from .receipt import Artefact

EXACT = 1e-3  # other orders of summation in float32
BOUNDS: Mapping[str, float] = {
    **dict.fromkeys(("float32", "f32"), EXACT),
    **dict.fromkeys(("bfloat16", "float16", "bf16", "f16"), 0.02),
    **dict.fromkeys(("q8_0", "w8a8", "fp8", "fp8-block", "q6_k"), 0.1),
    **dict.fromkeys(("q5_k_m", "q5_k_s", "q5_0"), 0.2),
    **dict.fromkeys(("q4_k_m", "q4_k_s", "q4_0", "w4a16"), 0.5),
}
"""Nats per token by which the loss may differ, and by which the artefact's greedy tokens may be
less probable than the checkpoint's. Chosen here, with room over what small models show."""


@dataclass(frozen=True)
class ProbeComparison:
    """The figures."""

    loss: float
    checkpoint_loss: float
    num_tokens: int
    equal_tokens: int
    compared_tokens: int
    regret: float
    """Nats per token by which the checkpoint finds the artefact's greedy tokens less probable than
    its own: 0 where they are equal, and nearly so where it is undecided."""
    bound: float

    @property
    def is_within(self) -> bool:
        """Whether the artefact computes the same, up to its format."""
        difference = abs(self.loss - self.checkpoint_loss)
        return math.isfinite(self.loss) and difference <= self.bound and self.regret <= self.bound

    def as_data(self) -> dict[str, Any]:
        """For the receipt."""
        return {**asdict(self), "passed": self.is_within}

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f}, of the checkpoint {self.checkpoint_loss:.4f}; "
            f"{self.equal_tokens} of {self.compared_tokens} greedy tokens are equal, the others "
            f"cost {self.regret:.4f} nats per token (bound of both {self.bound:g})"
        )


def compare(artefact: Artefact, found: ProbeOutputs, expected: ProbeOutputs) -> ProbeComparison:
    """The outputs of an artefact beside those of its checkpoint."""
    equal, regret, count = 0, 0.0, 0
    for own, theirs in zip(found.logps, expected.logps, strict=True):
        width = min(own.shape[1], theirs.shape[1])  # a file may have rows without a token
        best, chosen = theirs.argmax(1), own[:, :width].argmax(1)
        rows = torch.arange(len(best))
        equal += int((best == chosen).sum())
        regret += float((theirs[rows, best] - theirs[rows, chosen]).double().sum())
        count += len(best)
    return ProbeComparison(
        found.loss,
        expected.loss,
        found.num_tokens,
        equal,
        count,
        regret / count,
        bound_of(artefact),
    )


def bound_of(artefact: Artefact) -> float:
    """Of its format."""
    return BOUNDS.get(artefact.type, EXACT) if artefact.is_rounded else EXACT
