"""Generate responses: to many prompts at once, or to one while its text is shown.

A response follows from the prompt, the settings and the seed alone: not from the prompts beside it,
``batch_size``, or the number of replicas that divide the prompts. No response exceeds the model's
context length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from . import engine, in_batches
from .choosing import Chooser
from .decode import Decode, TextUntil
from .driver import inner_model, masked_attention
from .onednn import onednn_products
from .proof import driver_of, must_be_alone
from .requests import (
    EVERYTHING,
    Finished,
    OnToken,
    ReplicaShare,
    Request,
    requests_of,
)
from .samples import FinishReason, Ids, Sample, SampleStore
from .section import GenerateSection

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
    known: Mapping[int, Sample] = {} if store is None else store.known
    requests = _requests(model, prompts, section, seed)
    own = share.of(requests)
    todo = [request for request in own if request.index not in known]
    found = dict(known)
    told = _Progress(on_answered, len(requests), len(own))
    told.add(len(own) - len(todo))
    kept = _Kept(store, section.batch_size)
    try:
        for request, one in _finished(model, todo, requests, chooser):
            found[request.index] = one
            kept.add(request.index, one)
            told.add(1)
    finally:
        kept.flush()
    told.end()
    return found


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
    ((_, found),) = _finished(model, requests, requests, chooser, show)
    if piece := text.end():
        on_text(piece)
    return found


def _requests(
    model: nn.Module, prompts: Sequence[Ids], section: GenerateSection, seed: int | None
) -> list[Request]:
    most, left = section.max_new_tokens, [room(model, prompt) for prompt in prompts]
    allowed = [most if space is None else min(space, most) for space in left]
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
    driver = driver_of(model, longest) if requests and not is_alone else None
    if not todo:
        return
    size = 1 if is_alone else chooser.section.batch_size
    if driver is None:
        yield from in_batches.run(model, todo, chooser, batch_size=size, on_token=on_token)
        return
    with masked_attention(driver.inner), onednn_products(model):
        yield from engine.run(driver, todo, chooser, num_slots=size, on_token=on_token)


class _Progress:
    """Reports how many responses there are, as if all replicas were as far as this one."""

    def __init__(self, on_answered: Callable[[int], None] | None, total: int, own: int) -> None:
        self._on_answered, self._total, self._own = on_answered, total, own
        self._done = self._told = 0

    def add(self, count: int) -> None:
        """So many more of this replica's."""
        self._done += count
        self._tell(self._total * self._done // max(1, self._own))

    def end(self) -> None:
        """All of them."""
        self._tell(self._total)

    def _tell(self, count: int) -> None:
        if self._on_answered is not None and count > self._told:
            self._on_answered(count - self._told)
        self._told = max(count, self._told)


class _Kept:
    """Responses on their way to a store, some at a time: each write waits for the disk."""

    def __init__(self, store: SampleStore | None, size: int) -> None:
        self._store, self._size = store, size
        self._found = dict[int, Sample]()

    def add(self, index: int, one: Sample) -> None:
        """One more; written if there are enough."""
        self._found[index] = one
        if len(self._found) >= self._size:
            self.flush()

    def flush(self) -> None:
        """Write those that are waiting."""
        if self._found and self._store is not None:
            self._store.add(self._found)
        self._found = {}
