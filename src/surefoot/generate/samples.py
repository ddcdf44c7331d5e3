"""What a model has sampled: the ids, their log-probabilities, and why it ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Ids = Sequence[int]
FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True)
class Sample:
    """A sampled response."""

    ids: tuple[int, ...]  # with the stop token that ended it, or the token completing a stop text
    logps: tuple[float, ...]  # of each id, at the sampling temperature, over all of the vocabulary
    finish_reason: FinishReason  # context: prompt and response fill the model's context
    # of each id, the log of the probability that top_k, top_p and min_p left to sample from; () if
    # they left all. ``logps`` minus these are under the distribution that was sampled from.
    log_masses: tuple[float, ...] = ()
    version: int | None = None  # optimizer steps behind the weights, if that is known
    text_before_stop: str | None = (
        None  # the text before the stop text that ended it; None if none did
    )

    @property
    def text_ids(self) -> tuple[int, ...]:
        """The ids without the stop token. A stop text that ended the response is among them: up to
        and including the token that completed it, which may contain more text; see ``text``."""
        is_by_token = self.finish_reason == "stop" and self.text_before_stop is None
        return self.ids[:-1] if is_by_token else self.ids

    def text(self, decode: Callable[[Ids], str]) -> str:
        """Its text, without the stop token or the stop text that ended it."""
        return decode(self.text_ids) if self.text_before_stop is None else self.text_before_stop


class SampleStore(Protocol):
    """Responses that outlive this process, by the index of the prompt."""

    @property
    def known(self) -> Mapping[int, Sample]:
        """Those of an earlier attempt; the same on all ranks."""

    def add(self, samples: Mapping[int, Sample]) -> None:
        """Store some."""
