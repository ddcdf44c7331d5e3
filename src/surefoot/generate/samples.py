"""What a model has sampled: the ids, their log-probabilities, and why it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Ids = Sequence[int]
FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True)
class Sample:
    """A sampled response."""

    ids: tuple[int, ...]  # with the stop token that ended it
    logps: tuple[float, ...]  # of each id, at the sampling temperature, over all of the vocabulary
    finish_reason: FinishReason  # context: prompt and response fill the model's context
    # of each id, the log of the probability that top_k and top_p left to sample from; () if they
    # left all. ``logps`` minus these are under the distribution that was sampled from.
    log_masses: tuple[float, ...] = ()

    @property
    def text_ids(self) -> tuple[int, ...]:
        """The ids without the stop token."""
        return self.ids[:-1] if self.finish_reason == "stop" else self.ids


class SampleStore(Protocol):
    """Responses that outlive this process, by the index of the prompt."""

    @property
    def known(self) -> Mapping[int, Sample]:
        """Those of an earlier attempt; the same on all ranks."""

    def add(self, found: Mapping[int, Sample]) -> None:
        """Store some."""
