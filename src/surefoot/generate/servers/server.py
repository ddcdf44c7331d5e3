"""The protocols ``Sampler``, where responses are sampled, and ``SamplingServer``, another program
that samples them with the weights of now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..samples import Ids


@dataclass(frozen=True)
class ServedWeights:
    """Weights in a folder that a server reads, as Hugging Face's or PEFT's files."""

    folder: Path
    name: str  # by which requests name them
    is_adapter: bool
    is_named: bool = True  # whether responses must name them, too, if they name any


@dataclass(frozen=True)
class SamplingRequest:
    """Some responses to one prompt, sampled from the whole distribution at a temperature."""

    prompt: Ids
    count: int
    max_new_tokens: int
    temperature: float
    stops: Sequence[int]


@dataclass(frozen=True)
class ServerResponse:
    """One response as a server gave it; nothing in it has been checked."""

    ids: object
    logps: object
    finish_reason: object
    weights: object = None  # their name, if the server gives it


class SamplingServer(Protocol):
    """A program that samples. Its fields are its settings in the recipe."""

    url: str
    timeout: float
    concurrency: int

    @property
    def on_other_temperature(self) -> str:
        """What to do if its log-probabilities are of another temperature."""

    def load(self, weights: ServedWeights, before: ServedWeights | None) -> ServedWeights:
        """Make the server read ``weights``, in place of those ``before``; with the name that
        requests give. Raises ``RunError``."""

    def sample(self, request: SamplingRequest, weights: ServedWeights) -> list[ServerResponse]:
        """The responses. Raises ``RunError``."""


class Sampler(Protocol):
    """Where responses are sampled."""

    @property
    def server(self) -> SamplingServer | None:
        """The server; None: they are sampled by the process that trains."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Surefoot's own engine, in the process that trains."""

    server = None
