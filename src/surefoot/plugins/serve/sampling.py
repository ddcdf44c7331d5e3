"""The parameters of a request that say how it is sampled. None is ignored: what has no effect on
the answer is named as such, and everything else is refused."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator

from ...generate.live import Constraint, RowSettings
from ...generate.responses import (
    Chooser,
    Decode,
    OpenResponse,
    Request,
    pictures_of,
    requests_of,
)
from ...generate.section import GenerateSection, with_options
from .body import WITHOUT_EFFECT, Body, Strict, Texts
from .engine import EngineThread
from .models import ServedModel
from .prompts import room_for

_SEEDS = 2**63
_MOST_STOPS = 64
_TOKEN = re.compile("[0-9]{1,9}")


class StreamOptions(Strict):
    """What a stream has beside the answer."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = Field(default=None, description=WITHOUT_EFFECT)


class SamplingBody(Body):
    """How responses are sampled. What is not given is as in the run's recipe (``generate``)."""

    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=1 << 30)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(default=None, max_length=4096, fail_fast=True)
    seed: int | None = Field(default=None, ge=-_SEEDS, lt=_SEEDS)
    stop: str | Texts | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=256, fail_fast=True)
    ignore_eos: bool = False
    n: int | None = Field(default=None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool = True
    return_token_ids: bool | None = None

    prompt_name: ClassVar[str]  # the parameter that has the prompt

    @property
    def num_responses(self) -> int:
        """That the request is for."""
        return self.n or 1

    @property
    def may_have_pictures(self) -> bool:
        """Whether to read it may take as long as pictures do."""
        return False

    @property
    @abstractmethod
    def most_tokens(self) -> int | None:
        """Of a response; None: as many as the context has room for."""

    @property
    @abstractmethod
    def num_alternatives(self) -> int | None:
        """Most probable tokens to report; None: no probabilities."""

    @field_validator("stream_options")
    @classmethod
    def _check_options(
        cls, value: StreamOptions | None, info: ValidationInfo
    ) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("it needs stream: true")
        return value

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: str | list[str] | None) -> str | list[str] | None:
        texts = [value] if isinstance(value, str) else value or []
        if not all(texts):
            raise ValueError("an empty text would end every response")
        if len(texts) > _MOST_STOPS or any(len(text) > 1000 for text in texts):
            raise ValueError(f"at most {_MOST_STOPS} texts of 1,000 characters")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for token, bias in (value or {}).items():
            if not _TOKEN.fullmatch(token) or not -100 <= bias <= 100:
                raise ValueError("expected token ids with numbers from -100 to 100")
        return value


@dataclass(frozen=True)
class Bias:
    """``logit_bias``, and penalties of the tokens that a response has so far."""

    biases: dict[int, float]
    presence: float
    frequency: float

    @property
    def changes_logits(self) -> bool:
        """Whether it has an effect."""
        return bool(self.biases or self.presence or self.frequency)

    def apply(self, logits_V: torch.Tensor, row: OpenResponse) -> torch.Tensor:
        """OpenAI's formula: a token that occurred n times loses n * frequency + presence."""
        for token, bias in self.biases.items():
            logits_V[token] += bias
        if row.ids and (self.presence or self.frequency):
            counts_V = torch.bincount(torch.tensor(row.ids), minlength=len(logits_V))
            counts_V = counts_V.to(logits_V.device)
            logits_V -= self.frequency * counts_V + self.presence * (counts_V > 0)
        return logits_V

    def settle(self, token: int, row: OpenResponse) -> int:
        """It is as it was chosen."""
        return token

    def add(self, token: int) -> None:
        """The row has its tokens."""


def rows_for(
    engine: EngineThread,
    model: ServedModel,
    body: SamplingBody,
    prompts: Sequence[Sequence[int]],
    decode: Decode,
    constraints: Callable[[], Sequence[Constraint]] = tuple,
) -> list[tuple[Request, RowSettings]]:
    """``n`` rows for each prompt, each with ``constraints`` of its own, as they have a state. Not
    for the event loop, as it grows with them. Raises ``ApiError``: a prompt is empty, is too long,
    or has ids outside the vocabulary."""
    left = [room_for(model, prompt, body.prompt_name) for prompt in prompts]
    most = body.most_tokens or max(left)
    model.check_ids(stops := body.stop_token_ids or [], "stop_token_ids")
    if not body.ignore_eos:
        stops = [*stops, *model.opened.stop_token_ids]
    section = _section(body, model, most)
    # those that are reported are computed apart, as they may be before penalties and temperature
    chooser = Chooser(section, frozenset(stops), decode, has_logps=False)
    biases = {int(token): bias for token, bias in (body.logit_bias or {}).items()}
    model.check_ids(biases, "logit_bias")
    bias = Bias(biases, body.presence_penalty or 0.0, body.frequency_penalty or 0.0)
    biased = [bias] if bias.changes_logits else []

    def settings() -> RowSettings:
        every = (*biased, *constraints())
        return RowSettings(chooser, decode, every, body.num_alternatives, model.after_settings)

    count = body.n or 1
    given = [prompt if pictures_of(prompt) else tuple(prompt) for prompt in prompts]
    repeated = [ids for prompt in given for ids in [prompt] * count]  # no copies
    allowed = [min(space, most) for space in left for _ in range(count)]
    requests = requests_of(repeated, allowed, body.seed, max_new_tokens=most)
    return [(replace(request, index=engine.number()), settings()) for request in requests]


def _section(body: SamplingBody, model: ServedModel, most: int) -> GenerateSection:
    """The generation settings of a request."""
    names = ("temperature", "top_p", "min_p", "repetition_penalty")
    options: dict[str, Any] = {name: getattr(body, name) for name in names}
    options["top_k"] = None if body.top_k is None else max(body.top_k, 0)
    stop = (body.stop,) if isinstance(body.stop, str) else body.stop
    options["stop"] = None if stop is None else tuple(stop)
    # What a request leaves open is as in the recipe: what was evaluated is what is served.
    return with_options(model.opened.generate, {**options, "max_new_tokens": most})
