"""Requests that arrive while others are answered, each with settings of its own.

The rows of a model advance together, one token at a time. What a row gets follows from its prompt,
its settings and its seed alone: rows with equal settings choose their tokens together, and a row
that is cancelled makes room at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import nn

from . import _in_batches as in_batches
from ._proof import driver_of, must_be_alone
from ._slots import RowAdapters, masked_attention
from .generation import OpenRows, Waiting
from .responses import Chooser, Decode, OpenResponse, Request, TextUntil
from .section import FinishReason

_COLUMNS = 64  # of a slot at first


class Constraint(Protocol):
    """What changes the logits of one row, by the tokens that it has so far."""

    def apply(self, logits_V: torch.Tensor, row: OpenResponse) -> torch.Tensor:
        """The logits that the next token is chosen from."""

    def settle(self, token: int, row: OpenResponse) -> int:
        """The token that is taken, where ``token`` was chosen."""

    def add(self, token: int) -> None:
        """Note the token that was taken."""


@dataclass(frozen=True)
class RowSettings:
    """How one row is sampled, and what is reported of its tokens."""

    chooser: Chooser
    decode: Decode
    constraints: Sequence[Constraint] = ()
    num_alternatives: int | None = None  # most probable tokens to report; None: no probabilities
    is_after_settings: bool = False  # probabilities after penalties and temperature

    def settle(self, token: int, row: OpenResponse) -> int:
        """The token that is taken, where ``token`` was chosen."""
        for constraint in self.constraints:
            token = constraint.settle(token, row)
        return token


@dataclass(frozen=True)
class Token:
    """The next token of a request."""

    index: int  # of the request
    id: int
    text: str  # that is complete with it, and can be shown
    finish_reason: FinishReason | None  # None: the response goes on
    logp: float = 0.0
    alternatives: Sequence[tuple[int, float]] = ()  # tokens and log-probabilities


Emit = Callable[[Token], bool]  # called with each token; False ends the response


class Rows(Protocol):
    """The requests to one model."""

    @property
    def num_running(self) -> int:
        """Responses that are being generated."""

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""

    def add(self, request: Request, settings: RowSettings) -> None:
        """Let a request wait for a slot. Its index is its own."""

    def drop(self, index: int) -> None:
        """End a request, wherever it is."""

    def clear(self) -> None:
        """End all requests."""

    def step(self, emit: Emit) -> None:
        """Advance by a token each, or by a response."""


def rows_of(
    model: nn.Module,
    longest: int,
    num_slots: int,
    adapters: RowAdapters | None = None,
    *,
    batch_invariant: bool = False,
) -> Rows:
    """The requests to ``model``, of at most ``longest`` tokens each: in slots if it can be driven
    so, otherwise one by one. With ``adapters``, rows in slots have the adapter of their request."""
    driver = None if must_be_alone(model, longest) else driver_of(model, longest)
    if driver is None:
        return SingleRows(model)
    driver = replace(
        driver,
        adapters=adapters,
        batch_invariant=batch_invariant,
        is_replayed=not batch_invariant,
    )
    waiting = Waiting(driver, deque(), max(num_slots // 2, 1))
    return SlotRows(waiting, num_slots, longest, SingleRows(model))


@dataclass
class SlotRows:
    """Continuous batching. The cache grows with the rows, and is dropped when there are none."""

    waiting: Waiting
    num_slots: int
    longest: int
    alone: SingleRows  # those with pictures: slots know one position a token
    _open: OpenRows | None = None
    _settings: dict[int, RowSettings] = field(default_factory=dict)

    @property
    def num_running(self) -> int:
        """Rows in slots."""
        return self.alone.num_running + (0 if self._open is None else len(self._open.rows))

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return self.alone.num_waiting + len(self.waiting.requests)

    def add(self, request: Request, settings: RowSettings) -> None:
        """Let a request wait for a slot."""
        if request.pictures is not None:
            self.alone.add(request, settings)
            return
        self._settings[request.index] = settings
        self.waiting.requests.append(request)

    def drop(self, index: int) -> None:
        """Empty the slot of a request, or take it out of those that wait."""
        self.alone.drop(index)
        if self._settings.pop(index, None) is None:
            return
        for request in list(self.waiting.requests):
            if request.index == index:
                self.waiting.drop(request)
        for slot, row in enumerate(self._open.rows if self._open is not None else ()):
            if row.request.index == index and self._open is not None:
                self._open.remove(slot)
                break

    def clear(self) -> None:
        """End all requests."""
        self.alone.clear()
        self.waiting.requests.clear()
        self.waiting.prefixes.clear()
        self._settings.clear()
        self._open = None

    @torch.no_grad()
    def step(self, emit: Emit) -> None:
        """Fill the free slots, and advance each row by a token; answer a row with pictures."""
        if self.alone.num_waiting:
            self.alone.step(emit)
        with masked_attention(self.waiting.driver.inner):
            self._fill()
            if self._open is None:
                return
            tokens = advanced(self._open.logits(), self._open.rows, self._settings)
        for row in self._open.take_ended():
            self._settings.pop(row.request.index)
        if not self._open.rows:
            self._open = None
        for token in tokens:
            if not emit(token):
                self.drop(token.index)

    def _fill(self) -> None:
        while self.waiting.requests and self.num_running < self.num_slots:
            request, prefix = self.waiting.next()
            if self._open is None:
                cache = self.waiting.driver.slots(1, _COLUMNS, self.longest)
                self._open = OpenRows(self.waiting.driver, cache)
            slots = self._open.cache.step.num_slots
            num_rows = len(self._open.rows) + 1
            num_slots_needed = min(2 * slots, self.num_slots) if num_rows > slots else slots
            self._open.cache.grow(num_slots_needed, len(request.prompt))
            self._open.add(opened(request, self._settings[request.index]), prefix)


@dataclass
class SingleRows:
    """One response after another, of a model whose keys and values cannot be kept in slots."""

    model: nn.Module
    _waiting: deque[tuple[Request, RowSettings]] = field(default_factory=deque)
    _num_running: int = 0

    @property
    def num_running(self) -> int:
        """One or none."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """Requests that are not answered yet."""
        return len(self._waiting)

    def add(self, request: Request, settings: RowSettings) -> None:
        """Let a request wait."""
        self._waiting.append((request, settings))

    def drop(self, index: int) -> None:
        """Take out a request that waits."""
        self._waiting = deque(waiting for waiting in self._waiting if waiting[0].index != index)

    def clear(self) -> None:
        """End all requests."""
        self._waiting.clear()

    @torch.no_grad()
    def step(self, emit: Emit) -> None:
        """Answer the next request."""
        request, settings = self._waiting.popleft()
        self._num_running = 1
        chooser = _Alone(settings, emit)
        try:
            for _ in in_batches.run(self.model, [request], chooser, batch_size=1):
                pass
        except _DroppedError:
            pass
        finally:
            self._num_running = 0


class _DroppedError(Exception):
    """Nobody waits for a response any more."""


@dataclass(frozen=True)
class _Alone:
    """Chooses the tokens of one row by its settings."""

    settings: RowSettings
    emit: Emit

    @property
    def stops(self) -> frozenset[int]:
        """Tokens that end the response."""
        return self.settings.chooser.stops

    def opened(self, request: Request) -> OpenResponse:
        """A response without tokens yet."""
        return opened(request, self.settings)

    def advance(self, logits_BV: torch.Tensor, rows: Sequence[OpenResponse]) -> list[int]:
        """Append a token to the row."""
        tokens = advanced(logits_BV, rows, {row.request.index: self.settings for row in rows})
        if not all(self.emit(token) for token in tokens):
            raise _DroppedError
        return [token.id for token in tokens]


def opened(request: Request, settings: RowSettings) -> OpenResponse:
    """A response without tokens yet, whose text is followed."""
    return OpenResponse(request, TextUntil(settings.decode, settings.chooser.section.stop))


def advanced(
    logits_BV: torch.Tensor, rows: Sequence[OpenResponse], settings: Mapping[int, RowSettings]
) -> list[Token]:
    """Append a token to each of ``rows`` by its own settings; the tokens, in their order."""
    # One call for all rows that choose alike: kernels take as long for one row as for several.
    places_by_chooser: dict[Chooser, list[int]] = {}
    for place, row in enumerate(rows):
        places_by_chooser.setdefault(settings[row.request.index].chooser, []).append(place)
    by_place: dict[int, Token] = {}
    for chooser, places in places_by_chooser.items():
        group = [rows[place] for place in places]
        of_group = [settings[row.request.index] for row in group]
        raw_BV = (logits_BV if len(group) == len(rows) else logits_BV[places]).float()
        scores_BV = _constrained(raw_BV, group, of_group)
        reported = _reported(raw_BV, scores_BV, group, of_group)
        settle = [row_settings.settle for row_settings in of_group]
        tokens = chooser.advance(scores_BV, group, settle)
        for place, row, row_settings, token in zip(places, group, of_group, tokens, strict=True):
            for constraint in row_settings.constraints:
                constraint.add(token)
            by_place[place] = _token(row, token, reported.get(row.request.index), row_settings)
    return [by_place[place] for place in range(len(rows))]


def _constrained(
    raw_BV: torch.Tensor, rows: Sequence[OpenResponse], settings: Sequence[RowSettings]
) -> torch.Tensor:
    if not any(row_settings.constraints for row_settings in settings):
        return raw_BV
    scores_BV = raw_BV.clone()
    for place, (row, row_settings) in enumerate(zip(rows, settings, strict=True)):
        for constraint in row_settings.constraints:
            scores_BV[place] = constraint.apply(scores_BV[place], row)
    return scores_BV


def _reported(
    raw_BV: torch.Tensor,
    scores_BV: torch.Tensor,
    rows: Sequence[OpenResponse],
    settings: Sequence[RowSettings],
) -> dict[int, torch.Tensor]:
    """[V] the log-probabilities to report, by the index of the request."""
    logps = {}
    for place, (row, row_settings) in enumerate(zip(rows, settings, strict=True)):
        if row_settings.num_alternatives is not None:
            logits_1V = raw_BV[place : place + 1]
            if row_settings.is_after_settings:
                logits_1V = row_settings.chooser.scores(scores_BV[place : place + 1], [row])
            logps[row.request.index] = logits_1V[0].log_softmax(-1)
    return logps


def _token(
    row: OpenResponse, token: int, logps_V: torch.Tensor | None, settings: RowSettings
) -> Token:
    """What is reported of the last token of ``row``."""
    until = row.until
    assert until is not None
    text = until.pop() + (until.end() if row.finish_reason is not None else "")
    if logps_V is None:
        return Token(row.request.index, token, text, row.finish_reason)
    top = logps_V.topk(min(settings.num_alternatives or 0, len(logps_V)))
    pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return Token(row.request.index, token, text, row.finish_reason, float(logps_V[token]), pairs)
