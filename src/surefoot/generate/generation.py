"""Generate responses: to many prompts at once, or to one while its text is shown.

A response follows from the prompt, the settings and the seed alone, up to rounding: not from the
prompts beside it, ``batch_size``, or the number of replicas that divide the prompts. No response
exceeds the model's context length.

Rows of any length are side by side, and a row that has ended makes room for the next one at once. A
prompt is computed once for all requests with it. Its keys and values wait, with those of a few
prompts after it, until the last of these requests has a slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from . import _in_batches as in_batches
from ._proof import driver_of, must_be_alone
from ._slots import COLUMNS, Driver, Prefix, SlotCache, inner_model, masked_attention, padded_length
from .onednn import onednn_products
from .responses import (
    EVERYTHING,
    Chooser,
    Decode,
    Finished,
    OnToken,
    OpenResponse,
    Prompt,
    ReplicaShare,
    Request,
    TextUntil,
    distinct,
    prompt_of,
    requests_of,
)
from .section import FinishReason, GenerateSection, Ids, Sample, SampleStore

__all__ = [
    "EVERYTHING",
    "Chooser",
    "Decode",
    "FinishReason",
    "Ids",
    "ReplicaShare",
    "Sample",
    "SampleStore",
    "context_length",
    "room",
    "sample",
    "stream",
]


def context_length(model: nn.Module) -> int | None:
    """The context length: the most tokens of prompt and response together; None if unlimited."""
    config = inner_model(model).config.get_text_config()
    length = getattr(config, "max_position_embeddings", None)  # recurrent models have none
    return length if isinstance(length, int) and length > 0 else None


def room(model: nn.Module, prompt: Ids) -> int | None:
    """Remaining context after ``prompt``: 0 if it fills the context length; None: unlimited."""
    length = context_length(model)
    return None if length is None else max(0, length - len(prompt))


@torch.no_grad()
def sample(
    model: nn.Module,
    prompts: Sequence[Ids],
    chooser: Chooser,
    *,
    seed: int | None = None,
    on_answered: Callable[[int], None] | None = None,
    share: ReplicaShare = EVERYTHING,
    store: SampleStore | None = None,
) -> dict[int, Sample]:
    """The responses to the prompts of ``share``, by the index of the prompt.

    Args:
        model: in evaluation mode.
        prompts: token ids; none may be empty.
        chooser: has the generation settings with ``batch_size``, and ends responses.
        seed: makes sampling repeatable; torch's own generators are not changed.
        on_answered: called with numbers of responses, of all replicas if they keep pace.
        share: the prompts of this replica.
        store: gets responses as they end; those that it knows are not generated.

    A prompt that fills the context length gets an empty response; see ``room``. Equal prompts get
    different samples. A response that a stop text ends has the ids up to and including the token
    that completed it, and ``text_before_stop``, the text before it.
    """
    section = chooser.section
    earlier: Mapping[int, Sample] = {} if store is None else store.known
    requests = _requests(model, prompts, section, seed)
    of_replica = share.of(requests)
    missing = [request for request in of_replica if request.index not in earlier]
    samples, unwritten = dict(earlier), dict[int, Sample]()
    num_done, num_reported = len(of_replica) - len(missing), 0

    def report(count: int) -> None:
        nonlocal num_reported
        if on_answered is not None and count > num_reported:
            on_answered(count - num_reported)
        num_reported = max(count, num_reported)

    def write() -> None:
        if unwritten and store is not None:
            store.add(dict(unwritten))
        unwritten.clear()

    # as if all replicas were as far as this one
    report(len(requests) * num_done // max(1, len(of_replica)))
    try:
        for request, response in _finished(model, missing, requests, chooser):
            samples[request.index] = unwritten[request.index] = response
            if len(unwritten) >= section.batch_size:  # some at a time: a write waits for the disk
                write()
            num_done += 1
            report(len(requests) * num_done // len(of_replica))
    finally:
        write()
    report(len(requests))
    return samples


@torch.no_grad()
def stream(
    model: nn.Module,
    prompt: Ids,
    section: GenerateSection,
    *,
    stop_token_ids: Sequence[int],
    decode: Decode,
    on_text: Callable[[str], None],
    seed: int | None = None,
) -> Sample:
    """Generate the response to one prompt; ``on_text`` gets its text piece by piece.

    Whatever ``on_text`` raises (a KeyboardInterrupt, for example) ends the response and is passed
    on. The pieces concatenated are the full text. No part of a stop text is among them, so what may
    be its beginning is held back.
    """
    text, stops = TextUntil(decode, section.stop), frozenset(stop_token_ids)

    def show(_: Request, token: int) -> None:
        if token not in stops:
            text.push(token)
            if piece := text.pop():
                on_text(piece)

    requests, chooser = _requests(model, [prompt], section, seed), Chooser(section, stops, decode)
    ((_, sample),) = _finished(model, requests, requests, chooser, show)
    if piece := text.end():
        on_text(piece)
    return sample


def _requests(
    model: nn.Module, prompts: Sequence[Ids], section: GenerateSection, seed: int | None
) -> list[Request]:
    most, rooms = section.max_new_tokens, [room(model, prompt) for prompt in prompts]
    allowed = [most if space is None else min(space, most) for space in rooms]
    return requests_of(prompts, allowed, seed, max_new_tokens=most)


def _finished(
    model: nn.Module,
    todo: Sequence[Request],
    requests: Sequence[Request],
    chooser: Chooser,
    on_token: OnToken | None = None,
) -> Iterator[Finished]:
    """The samples of ``todo``, which are some of ``requests``, as they end."""
    yield from ((request, Sample((), (), "context")) for request in todo if not request.most)
    todo = [request for request in todo if request.most]
    longest = max((len(request.prompt) + request.most for request in requests), default=0)
    is_alone = must_be_alone(model, longest)
    # also where there is nothing to do: ranks may run the model in step
    has_text = any(request.pictures is None for request in requests)
    driver = driver_of(model, longest) if has_text and not is_alone else None
    # Slots know one position a token; transformers knows those of each model, and reads pixels in
    # the first pass only.
    pictured = [request for request in todo if request.pictures is not None]
    todo = [request for request in todo if request.pictures is None]
    size = 1 if is_alone else chooser.section.batch_size
    yield from in_batches.run(model, pictured, chooser, batch_size=size, on_token=on_token)
    if not todo:
        return
    if driver is None:
        yield from in_batches.run(model, todo, chooser, batch_size=size, on_token=on_token)
        return
    invariant = chooser.section.batch_invariant
    driver = replace(driver, batch_invariant=invariant, is_replayed=not invariant)
    with masked_attention(driver.inner), onednn_products(model):
        yield from run(driver, todo, chooser, num_slots=size, on_token=on_token)


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
        max_prompts = max(1, _TOKENS // max(1, length))
        near = [self.requests[i] for i in range(min(self.ahead, len(self.requests)))]
        same = [prompt for prompt in distinct(near) if padded_length(prompt[1]) == length]
        return same[:max_prompts]

    def drop(self, request: Request) -> bool:
        """Take out a request; whether it was waiting."""
        if request not in self.requests:
            return False
        self.requests.remove(request)
        prompts = set(map(prompt_of, self.requests))
        self.prefixes = {ids: prefix for ids, prefix in self.prefixes.items() if ids in prompts}
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
        # The first slots are always the rows, so that a step reads them as one slice.
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
    open_rows = OpenRows(driver, _slots(driver, requests, num_slots))
    while open_rows.rows or waiting.requests:
        while waiting.requests and len(open_rows.rows) < num_slots:
            request, prefix = waiting.next()
            open_rows.add(chooser.opened(request), prefix)
        tokens = chooser.advance(open_rows.logits(), open_rows.rows)
        if on_token is not None:
            for row, token in zip(open_rows.rows, tokens, strict=True):
                on_token(row.request, token)
        yield from ((row.request, row.sample) for row in open_rows.take_ended())


def _slots(driver: Driver, requests: Sequence[Request], num_slots: int) -> SlotCache:
    """Slots for the longest prompt and the start of its response; they grow up to the longest row
    that there may be."""
    # Not pages of keys and values: on a CPU every step would gather them, and slots waste at most
    # the difference of the rows' lengths (decisions/0053).
    longest = max(len(request.prompt) for request in requests)
    bound = max(len(request.prompt) + request.most for request in requests)
    return driver.slots(num_slots, min(longest + 4 * COLUMNS, bound), bound)
