"""The recipe's ``generate`` section, and what sampling by it gives: the ids of a response, their
log-probabilities, and why it ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Protocol

from ..schema import Needs, must

OF_SAMPLING = Needs("do_sample", (True,))
LEAST_TEMPERATURE = 1e-5  # logits that are divided by less may be infinite; vLLM's bound as well


@dataclass(frozen=True, kw_only=True)
class GenerateSection:
    """How responses are sampled, in ``chat``, ``predict`` and ``eval``."""

    max_new_tokens: int = 256
    """Longest response in tokens."""
    do_sample: bool = False
    """Sample instead of always taking the most probable token."""
    temperature: Annotated[float, OF_SAMPLING] = 1.0
    """Flattens (above 1) or sharpens (below 1) the distribution sampled from."""
    top_p: Annotated[float, OF_SAMPLING] = 1.0
    """Sample from the most probable tokens that together have this probability."""
    top_k: Annotated[int, OF_SAMPLING] = 0
    """Sample from this many most probable tokens; 0 means all."""
    min_p: Annotated[float, OF_SAMPLING] = 0.0
    """Sample from the tokens that have at least this share of the probability of the most probable
    one (arXiv:2407.01082); 0 means all."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that already occurred become less probable (arXiv:1909.05858)."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, wherever in a token they begin; the response is the text
    before."""
    batch_size: int = 16
    """Responses that are generated at a time in ``predict`` and ``eval``. Each keeps the keys and
    values of its tokens in memory; the responses do not depend on it."""
    batch_invariant: bool = False
    """Compute rows in multiples of 4 and read keys in multiples of 16, so that on some processors
    (AMD EPYC with AVX-512, in float32) a response has the same bits whatever is generated beside
    it. A response that is alone then takes 1.4 times as long. ``eval`` and stages that sample
    always compute so."""

    def __post_init__(self) -> None:
        must(self, "be at least 1", "max_new_tokens", "batch_size")
        must(self, "be positive", "repetition_penalty")
        must(self, "not be negative", "top_k")
        if self.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature must be at least {LEAST_TEMPERATURE:g}, got {self.temperature}; "
                "do_sample: false is greedy"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if not all(self.stop):
            raise ValueError("stop must not contain an empty text, which would end every response")


_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p")  # settings that only sampling has


def sampling(max_new_tokens: int, temperature: float, batch_size: int) -> GenerateSection:
    """Sampling from the whole distribution, as stages do that train on samples."""
    return GenerateSection(
        max_new_tokens=max_new_tokens,
        do_sample=True,
        temperature=temperature,
        batch_size=batch_size,
        # samples should depend on ranks, or on a split for want of memory, as little as they can
        batch_invariant=True,
    )


def with_options(section: GenerateSection, options: Mapping[str, object]) -> GenerateSection:
    """Sampling with other settings; a setting that is None is left as it is. ``greedy``, or a
    temperature of 0 (or below 1e-5), turns sampling off; any setting that only sampling has turns
    it on."""
    names = ("max_new_tokens", *_OF_SAMPLING, "repetition_penalty", "stop")
    settings = {name: options[name] for name in names if options.get(name) is not None}
    temperature = settings.get("temperature")
    is_cold = isinstance(temperature, int | float) and 0 <= temperature < LEAST_TEMPERATURE
    is_greedy = bool(options.get("greedy")) or is_cold
    if is_greedy:
        settings = {name: settings[name] for name in settings if name not in _OF_SAMPLING}
        settings["do_sample"] = False
    elif settings.keys() & {"temperature", "top_p", "top_k"} or settings.get("min_p"):
        settings["do_sample"] = True
    return replace(section, **settings)  # type: ignore[arg-type]


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
