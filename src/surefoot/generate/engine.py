"""Continuous batching: rows of any length side by side, and a row that has ended makes room for the
next one at once.

A prompt is computed once for all requests with it. Its keys and values wait, with those of a few
prompts after it, until the last of these requests has a slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from .choosing import Chooser
from .driver import Driver, Prefix, padded_length
from .requests import Finished, OnToken, OpenResponse, Prompt, Request, distinct, prompt_of
from .slots import COLUMNS, SlotCache

_TOKENS = 4096  # of prompts that are computed in one pass, unless one alone has more


@dataclass
class Waiting:
    """The requests without a slot, in order, and the prompts that are computed ahead for them."""

    driver: Driver
    requests: deque[Request]
    ahead: int  # requests whose prompts are computed in one pass, if they are short enough
    prefixes: dict[Prompt, Prefix] = field(default_factory=dict)

    def next(self) -> tuple[Request, Prefix]:
        """The next request, with its prompt."""
        prompt = prompt_of(self.requests[0])
        if prompt not in self.prefixes:
            chunk = self._chunk()
            adapters, prompts = zip(*chunk, strict=True)
            self.prefixes |= zip(chunk, self.driver.prefill(prompts, adapters), strict=True)
        request, prefix = self.requests.popleft(), self.prefixes[prompt]
        if not self.requests or prompt_of(self.requests[0]) != prompt:
            del self.prefixes[prompt]
        return request, prefix

    def _chunk(self) -> list[Prompt]:
        """The next prompts that have the same padded length."""
        length = padded_length(self.requests[0].prompt)
        most = max(1, _TOKENS // max(1, length))
        near = [self.requests[i] for i in range(min(self.ahead, len(self.requests)))]
        same = [prompt for prompt in distinct(near) if padded_length(prompt[1]) == length]
        return same[:most]

    def drop(self, request: Request) -> bool:
        """Take out a request; whether it was waiting."""
        if request not in self.requests:
            return False
        self.requests.remove(request)
        wanted = set(map(prompt_of, self.requests))
        self.prefixes = {one: prefix for one, prefix in self.prefixes.items() if one in wanted}
        return True


@dataclass
class OpenRows:
    """The rows that are being generated, each in its slot."""

    driver: Driver
    cache: SlotCache
    rows: list[OpenResponse] = field(default_factory=list)

    def add(self, row: OpenResponse, prefix: Prefix) -> None:
        """Put a row with its prompt into the next slot."""
        self.cache.put(len(self.rows), prefix)
        self.rows.append(row)

    def logits(self) -> torch.Tensor:
        """[B, V] the logits after the last token of each row."""
        tokens, positions = [row.last for row in self.rows], [row.position for row in self.rows]
        adapters = [row.request.adapter for row in self.rows]
        return self.driver.decode(self.cache, tokens, positions, adapters)

    def remove(self, slot: int) -> OpenResponse:
        """Take out a row; the last one moves into its slot."""
        row, last = self.rows[slot], self.rows.pop()
        if last is not row:
            self.cache.move(len(self.rows), slot, last.position)
            self.rows[slot] = last
        return row

    def take_ended(self) -> Iterator[OpenResponse]:
        """Take out the rows that have ended."""
        for slot in reversed(range(len(self.rows))):
            if self.rows[slot].finish_reason is not None:
                yield self.remove(slot)


def run(
    driver: Driver,
    requests: Sequence[Request],
    chooser: Chooser,
    *,
    num_slots: int,
    on_token: OnToken | None = None,
) -> Iterator[Finished]:
    """The samples of ``requests`` as they end. Equal prompts are to follow each other.

    Args:
        driver: runs the model.
        requests: those with room for a token at least.
        chooser: chooses the tokens.
        num_slots: most rows at a time.
        on_token: called with each token.
    """
    num_slots = min(num_slots, len(requests))
    waiting = Waiting(driver, deque(requests), max(num_slots // 2, 1))
    found = OpenRows(driver, _cache(requests, num_slots))
    while found.rows or waiting.requests:
        while waiting.requests and len(found.rows) < num_slots:
            request, prefix = waiting.next()
            found.add(chooser.opened(request), prefix)
        tokens = chooser.advance(found.logits(), found.rows)
        if on_token is not None:
            for row, token in zip(found.rows, tokens, strict=True):
                on_token(row.request, token)
        yield from ((row.request, row.sample) for row in found.take_ended())


def _cache(requests: Sequence[Request], num_slots: int) -> SlotCache:
    """Slots for the longest prompt and the start of its response; they grow up to the longest row
    that there may be."""
    longest = max(len(request.prompt) for request in requests)
    bound = max(len(request.prompt) + request.most for request in requests)
    return SlotCache(num_slots, min(longest + 4 * COLUMNS, bound), bound)
