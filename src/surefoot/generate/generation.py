"""Generate responses: to many prompts at once, or to one while its text is shown.

Prompts of similar length share a batch, padded on the left, so that all responses start at once; a
response is the same as if its prompt were alone. No response exceeds the model's context length.

Batches, and the samples in each, follow from the prompts and the seed alone, so that replicas can
divide them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation import BaseStreamer

from .decode import Decode, TextStream
from .section import GenerateSection

logger = logging.getLogger(__name__)
Ids = Sequence[int]
_PADDABLE = "ignores_padding_of_prompts"  # an attribute of models that have been tried
FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True)
class Sample:
    """A sampled response."""

    ids: tuple[int, ...]  # with the stop token that ended it
    logps: tuple[float, ...]  # of each id, at the sampling temperature, over all of the vocabulary
    finish_reason: FinishReason  # context: prompt and response fill the model's context

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
        """Store those of one batch."""


@dataclass(frozen=True)
class BatchSlice:
    """Every ``count``-th batch, from ``index`` on."""

    index: int = 0
    count: int = 1

    def has(self, number: int) -> bool:
        """Whether batch ``number`` is in it."""
        return number % self.count == self.index


EVERYTHING = BatchSlice()


def context_length(model: nn.Module) -> int | None:
    """The context length: the most tokens of prompt and response together; None if unlimited."""
    config = _inner(model).config.get_text_config()
    length = getattr(config, "max_position_embeddings", None)  # recurrent models have none
    return length if isinstance(length, int) and length > 0 else None


def room(model: nn.Module, prompt: Ids) -> int | None:
    """Remaining context after ``prompt``: 0 if it fills the context length; None: unlimited."""
    length = context_length(model)
    return None if length is None else max(0, length - len(prompt))


def sample(
    model: nn.Module,
    prompts: Sequence[Ids],
    section: GenerateSection,
    *,
    stop_token_ids: Sequence[int],
    seed: int | None = None,
    on_answered: Callable[[int], None] | None = None,
    share: BatchSlice = EVERYTHING,
    store: SampleStore | None = None,
) -> dict[int, Sample]:
    """The responses to the prompts of ``share``, by the index of the prompt.

    Args:
        model: in evaluation mode.
        prompts: token ids; none may be empty.
        section: generation settings, and ``batch_size``.
        stop_token_ids: tokens that end a response.
        seed: makes sampling repeatable; torch's own generators are not changed.
        on_answered: called with the number of responses of each batch; also for batches of other
            replicas.
        share: the batches of this replica.
        store: gets the responses of each batch; batches that it knows are not generated.

    A prompt that fills the context length gets an empty response; see ``room``.
    """
    known: Mapping[int, Sample] = {} if store is None else store.known
    found = dict(known)
    allowed = [_allowed(model, prompt, section) for prompt in prompts]
    size = section.batch_size if _ignores_padding(model, prompts, section.batch_size) else 1
    batches = _batches([len(p) for p in prompts], allowed, size)
    for number, batch in enumerate(batches):
        if share.has(number) and any(i not in known for i in batch):
            most, given = allowed[batch[0]], [prompts[i] for i in batch]
            with _seeded(None if seed is None else _derived(seed, number), model):
                made = _sampled(model, given, section, most, stop_token_ids)
            found |= zip(batch, made, strict=True)
            if store is not None:
                store.add(dict(zip(batch, made, strict=True)))
        if on_answered is not None:
            on_answered(len(batch))
    return found


def _sampled(
    model: nn.Module,
    prompts: Sequence[Ids],
    section: GenerateSection,
    most: int,
    stop_token_ids: Sequence[int],
) -> list[Sample]:
    """One batch of responses of at most so many tokens."""
    if not most:
        return [Sample((), (), "context") for _ in prompts]
    config = generation_config(section, max_new_tokens=most, stop_token_ids=stop_token_ids)
    recorder = _LogProbabilities(section.temperature if section.do_sample else 1.0)
    rows = _generate(model, prompts, config, recorder=recorder)
    out_of_tokens: FinishReason = "length" if most == section.max_new_tokens else "context"
    found = []
    for ids, logps in zip(rows, recorder.of(rows), strict=True):
        kept = len(_before_stop(ids, stop_token_ids))
        is_over = kept < len(ids)
        end = kept + is_over
        reason = "stop" if is_over else out_of_tokens
        found.append(Sample(tuple(ids[:end]), tuple(logps[:end]), reason))
    return found


def generation_config(
    section: GenerateSection, *, max_new_tokens: int, stop_token_ids: Sequence[int]
) -> GenerationConfig:
    """All settings of generation, without those of the model's own files.

    Args:
        section: temperature and so on; they have no effect unless it samples.
        max_new_tokens: at most ``section.max_new_tokens``.
        stop_token_ids: a response ends before the first of these.
    """
    stops = list(stop_token_ids)
    settings: dict[str, object] = {
        "max_new_tokens": max_new_tokens,
        "do_sample": section.do_sample,
        "repetition_penalty": section.repetition_penalty,
        "eos_token_id": stops or None,
        "pad_token_id": padding(stop_token_ids),
    }
    if section.do_sample:
        settings |= {name: getattr(section, name) for name in ("temperature", "top_p", "top_k")}
    return GenerationConfig(**settings)


def padding(stop_token_ids: Sequence[int]) -> int:
    """The padding id of a batch: masked before a prompt, removed after a response."""
    return stop_token_ids[0] if stop_token_ids else 0


class _LogProbabilities(LogitsProcessor):  # type: ignore[misc]
    """Records the log-probability of each token that is sampled, from logits [B, V] of one step at
    a time: all steps of them would not fit."""

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._next: torch.Tensor | None = None  # [B, V] log-probabilities of the next token
        self._found: list[torch.Tensor] = []  # [B] of each token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Leaves ``scores`` as they are."""
        self._take(input_ids[:, -1])
        self._next = torch.log_softmax(scores / self._temperature, dim=-1)
        return scores

    def _take(self, tokens_B: torch.Tensor) -> None:
        if self._next is not None:
            self._found.append(self._next.gather(-1, tokens_B[:, None])[:, 0])

    def of(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """[B, tokens] of the tokens in ``rows``, which are all that were sampled."""
        assert self._next is not None
        self._take(torch.tensor([row[-1] for row in rows], device=self._next.device))
        found: list[list[float]] = torch.stack(self._found, dim=1).tolist()
        return found


def stream(
    model: nn.Module,
    prompt: Ids,
    section: GenerateSection,
    *,
    stop_token_ids: Sequence[int],
    decode: Decode,
    on_text: Callable[[str], None],
    seed: int | None = None,
) -> list[int]:
    """Generate the response to one prompt; ``on_text`` gets its text piece by piece.

    Whatever ``on_text`` raises (a KeyboardInterrupt, for example) ends the response and is passed
    on. The pieces concatenated are the full text.
    """
    allowed = _allowed(model, prompt, section)
    if not allowed:
        return []
    config = generation_config(section, max_new_tokens=allowed, stop_token_ids=stop_token_ids)
    shown = _Shown(TextStream(decode), on_text, frozenset(stop_token_ids))
    with _seeded(seed, model):
        found = _generate(model, [prompt], config, shown)
    return _before_stop(found[0], stop_token_ids)


class _Forced(LogitsProcessor):  # type: ignore[misc]
    """Keeps the logits [B, V] of each step, and forces the same tokens in every row."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.found.append(scores.float())
        forced = torch.full_like(scores, -torch.inf)
        forced[:, 11 * len(self.found) % scores.shape[1]] = 0.0
        return forced


def _ignores_padding(model: nn.Module, prompts: Sequence[Ids], size: int) -> bool:
    """Whether a prompt that is padded to share a batch gets the response that it gets alone. Tried
    once for each model: padding may enter the state of a recurrent one."""
    if size == 1 or len({len(prompt) for prompt in prompts}) < 2:
        return True
    known = vars(_inner(model))
    if _PADDABLE not in known:
        known[_PADDABLE] = _is_padded_as_alone(model)
        if not known[_PADDABLE]:
            logger.warning(
                "%s: responses depend on padding, so prompts are answered one by one "
                "(generate.batch_size has no effect)",
                type(_inner(model)).__name__,
            )
    return bool(known[_PADDABLE])


def _is_padded_as_alone(model: nn.Module) -> bool:
    vocabulary = _inner(model).config.get_text_config().vocab_size
    short, long = ([(7 * n + 3) % vocabulary for n in range(count)] for count in (3, 16))
    alone, padded = (_logits_of_first(model, rows) for rows in ([short], [short, long]))
    # in few bits, sums of another length may differ by more
    share = 1e-3 if _inner(model).dtype == torch.float32 else 0.1
    return float((alone - padded).abs().max()) <= share * float(alone.abs().max())


def _logits_of_first(model: nn.Module, prompts: Sequence[Ids]) -> torch.Tensor:
    """[steps, V] of the first prompt; a state that padding has entered may show in later ones."""
    recorder = _Forced()
    config = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0)
    _generate(model, prompts, config, recorder=recorder)
    return torch.stack([logits[0] for logits in recorder.found])


class _Shown(BaseStreamer):  # type: ignore[misc]
    """Converts each new token of ``generate`` to text."""

    def __init__(
        self, text: TextStream, on_text: Callable[[str], None], stops: frozenset[int]
    ) -> None:
        self._text, self._on_text, self._stops = text, on_text, stops
        self._is_prompt = True
        self._is_over = False

    def put(self, value: torch.Tensor) -> None:
        """The prompt, then one token at a time."""
        if self._is_prompt:
            self._is_prompt = False
            return
        token_id = int(value)
        self._is_over |= token_id in self._stops
        if not self._is_over and (piece := self._text.push(token_id)):
            self._on_text(piece)

    def end(self) -> None:
        """No more tokens."""
        if piece := self._text.end():
            self._on_text(piece)


def _allowed(model: nn.Module, prompt: Ids, section: GenerateSection) -> int:
    left = room(model, prompt)
    return section.max_new_tokens if left is None else min(left, section.max_new_tokens)


def _batches(lengths: Sequence[int], allowed: Sequence[int], size: int) -> Iterator[list[int]]:
    """Indices of prompts that share a batch: equal remaining context, similar lengths."""
    order = sorted(range(len(lengths)), key=lambda i: (allowed[i], lengths[i]))
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) == size or allowed[index] != allowed[batch[0]]):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _generate(
    model: nn.Module,
    prompts: Sequence[Ids],
    config: GenerationConfig,
    streamer: BaseStreamer | None = None,
    recorder: LogitsProcessor | None = None,
) -> list[list[int]]:
    """The ids after every prompt, with whatever follows a stop token. A ``recorder`` gets the
    logits of each step, penalties applied."""
    inner = _inner(model)
    longest = max(map(len, prompts))
    filler = padding(config.eos_token_id or ())
    missing = [longest - len(prompt) for prompt in prompts]
    rows = [[filler] * n + list(p) for n, p in zip(missing, prompts, strict=True)]
    mask = [[0] * n + [1] * len(p) for n, p in zip(missing, prompts, strict=True)]
    with _alone(inner, config):
        found = cast(PreTrainedModel, model).generate(
            input_ids=torch.tensor(rows, device=inner.device),
            attention_mask=torch.tensor(mask, device=inner.device),
            generation_config=config,
            streamer=streamer,
            logits_processor=LogitsProcessorList([] if recorder is None else [recorder]),
            synced_gpus=False,  # ranks with other prompts need not be waited for at each token
        )
    return cast(list[list[int]], found[:, longest:].tolist())


def _before_stop(ids: Sequence[int], stop_token_ids: Sequence[int]) -> list[int]:
    end = next((i for i, token_id in enumerate(ids) if token_id in stop_token_ids), len(ids))
    return list(ids[:end])


def _inner(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, or ``model`` itself."""
    is_plain = isinstance(model, PreTrainedModel)
    return cast(PreTrainedModel, model if is_plain else model.get_base_model())  # type: ignore[operator]


@contextmanager
def _alone(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """Generate by ``config`` alone, without settings of the model's own."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


def _derived(seed: int, number: int) -> int:
    """A seed for batch ``number``; close inputs give unrelated ones."""
    mixed = np.random.SeedSequence([abs(seed), int(seed < 0), number])
    return int(mixed.generate_state(1, np.uint64)[0] >> np.uint64(1))


@contextmanager
def _seeded(seed: int | None, model: nn.Module) -> Iterator[None]:
    if seed is None:
        yield
        return
    device = _inner(model).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
