"""Requests to a model: prompts with a seed of their own, and which replica answers them.

The seed of a sample is a function of the run's seed, the prompt's ids, and how many equal prompts
come before it. So a response depends on nothing else that is generated beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from .decode import TextUntil
from .samples import FinishReason, Ids, Sample

_BLOCK = 128  # numbers that are drawn at once


@dataclass(frozen=True)
class Request:
    """A prompt to be answered once."""

    index: int  # in the list of prompts
    prompt: tuple[int, ...]
    most: int  # tokens of the response
    out_of_tokens: FinishReason  # why it ends there
    entropy: tuple[int, ...]  # the seed of its numbers
    adapter: str | None = None  # of those that rows of one pass may have; None: the base alone


@dataclass(frozen=True)
class ReplicaShare:
    """The requests of one of ``count`` replicas of a model."""

    index: int = 0
    count: int = 1

    def of(self, requests: Sequence[Request]) -> list[Request]:
        """Those of this replica, the longest prompts first. Equal prompts, which are computed
        once, stay together, unless there are fewer different ones than replicas."""
        groups = dict[tuple[int, ...], list[Request]]()
        for request in requests:
            groups.setdefault(request.prompt, []).append(request)
        units = sorted(groups.values(), key=lambda group: -len(group[0].prompt))
        if len(units) < self.count:
            units = [[request] for group in units for request in group]
        return [request for unit in units[self.index :: self.count] for request in unit]


EVERYTHING = ReplicaShare()


def requests_of(
    prompts: Sequence[Ids], allowed: Sequence[int], seed: int | None, *, max_new_tokens: int
) -> list[Request]:
    """One for each prompt, with at most ``allowed`` tokens for its response. Without a seed, no two
    calls draw the same numbers."""
    first = np.random.SeedSequence().entropy if seed is None else seed
    assert isinstance(first, int)
    counts, found = dict[tuple[int, ...], int](), []
    for index, (prompt, most) in enumerate(zip(prompts, allowed, strict=True)):
        ids = tuple(prompt)
        counts[ids] = number = counts.get(ids, -1) + 1
        entropy = (abs(first), int(first < 0), number, _hash(ids))
        reason: FinishReason = "length" if most == max_new_tokens else "context"
        found.append(Request(index, ids, most, reason, entropy))
    return found


def _hash(ids: Ids) -> int:
    digest = hashlib.blake2b(np.asarray(ids, np.int64).tobytes(), digest_size=16)
    return int.from_bytes(digest.digest(), "little")


class Draws:
    """Uniform numbers in [0, 1), one for each token of a sample."""

    def __init__(self, entropy: Sequence[int]) -> None:
        self._generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))
        self._block: list[float] = []

    def next(self) -> float:
        """The next number."""
        if not self._block:
            self._block = self._generator.random(_BLOCK)[::-1].tolist()
        return self._block.pop()


@dataclass
class OpenResponse:
    """A response that is being generated."""

    request: Request
    until: TextUntil | None = None  # its text, if there are texts that end it
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    log_masses: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None  # None: it goes on

    def __post_init__(self) -> None:
        self.draws = Draws(self.request.entropy)

    @property
    def last(self) -> int:
        """The last token of prompt and response."""
        return self.ids[-1] if self.ids else self.request.prompt[-1]

    @property
    def position(self) -> int:
        """Where the last token is."""
        return len(self.request.prompt) + len(self.ids) - 1

    def add(self, token: int, logp: float, log_mass: float | None, stops: frozenset[int]) -> None:
        """Append a token, and find out whether it is the last one."""
        self.ids.append(token)
        self.logps.append(logp)
        if log_mass is not None:
            self.log_masses.append(log_mass)
        if token in stops or (self.until is not None and self.until.push(token)):
            self.finish_reason = "stop"
        elif len(self.ids) == self.request.most:
            self.finish_reason = self.request.out_of_tokens

    @property
    def sample(self) -> Sample:
        """The response, which has ended."""
        assert self.finish_reason is not None
        told = (tuple(self.ids), tuple(self.logps), self.finish_reason)
        until = self.until
        text_before_stop = until.text if until is not None and until.has_ended else None
        return Sample(*told, tuple(self.log_masses), text_before_stop=text_before_stop)


class TokenChooser(Protocol):
    """Chooses the next token of each row, and ends the rows that are complete."""

    @property
    def stops(self) -> frozenset[int]:
        """Tokens that end a response."""

    def opened(self, request: Request) -> OpenResponse:
        """A response without tokens yet."""

    def advance(self, logits_BV: torch.Tensor, rows: Sequence[OpenResponse]) -> list[int]:
        """Append a token to each of ``rows``, from the logits after its last one; the tokens."""


Finished = tuple[Request, Sample]
OnToken = Callable[[Request, int], None]  # called with each token as it is sampled


Prompt = tuple[str | None, tuple[int, ...]]  # the adapter that reads it, and its tokens


def prompt_of(request: Request) -> Prompt:
    """What is computed once for all requests with it."""
    return request.adapter, request.prompt


def distinct(requests: Iterable[Request]) -> list[Prompt]:
    """Their prompts, each once, in order."""
    return list(dict.fromkeys(map(prompt_of, requests)))
