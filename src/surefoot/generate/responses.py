"""A response from its request to its text: who answers it, how its tokens are chosen from logits,
when it ends, and what of its text may be shown.

The seed of a sample is a function of the run's seed, the prompt's ids, and how many equal prompts
come before it. So a response depends on nothing else that is generated beside it. Tokens are chosen
by penalty, temperature, top_k, top_p and min_p, in transformers' order and by its own functions,
then one uniform number for each row. Only complete characters are shown: a token may contain some
bytes of one, or need the next token for its spaces.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from transformers import (
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..parallel.progress import wait_for_ranks
from .section import FinishReason, GenerateSection, Ids, Sample

_BLOCK = 128  # numbers that are drawn at once


class PromptMedia(Protocol):
    """The pictures of a prompt."""

    @property
    def key(self) -> str:
        """Equal for equal pictures."""

    def thumbnails(self) -> list[str]:
        """Small copies, as data URLs."""

    def read(self) -> PromptMedia:
        """The same, decoded, so that the answer need not wait for it. Raises ``DataError``."""

    def inputs(self, ids_BT: torch.Tensor, prompts: Sequence[Any]) -> Mapping[str, torch.Tensor]:
        """What a model gets beside rows of ids, each of which is one of ``prompts``, of this class;
        padding may stand before it."""


class PicturePrompt(tuple[int, ...]):
    """The ids of a prompt with placeholders of pictures. Whatever copies its ids has to keep its
    pictures; without them, a model would answer from the text alone."""

    pictures: PromptMedia

    @classmethod
    def of(cls, ids: Ids, pictures: PromptMedia) -> PicturePrompt:
        """The ids with their pictures."""
        prompt = cls(ids)
        prompt.pictures = pictures
        return prompt


def pictures_of(prompt: Ids) -> PromptMedia | None:
    """The pictures of a prompt, if it has any."""
    return prompt.pictures if isinstance(prompt, PicturePrompt) else None


@dataclass(frozen=True)
class Request:
    """A prompt to be answered once."""

    index: int  # in the list of prompts
    prompt: tuple[int, ...]
    most: int  # tokens of the response
    out_of_tokens: FinishReason  # why it ends there
    entropy: tuple[int, ...]  # the seed of its numbers
    adapter: str | None = None  # of those that rows of one pass may have; None: the base alone
    pictures: PromptMedia | None = None  # whose placeholders the prompt has


@dataclass(frozen=True)
class ReplicaShare:
    """The requests of one of ``count`` replicas of a model."""

    index: int = 0
    count: int = 1
    is_first: bool = True  # whether this rank is the first one of the replica

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
    counts, requests = dict[tuple[tuple[int, ...], str], int](), []
    for index, (prompt, limit) in enumerate(zip(prompts, allowed, strict=True)):
        ids, pictures = tuple(prompt), pictures_of(prompt)
        key = (ids, "" if pictures is None else pictures.key)
        counts[key] = number = counts.get(key, -1) + 1
        entropy = (abs(first), int(first < 0), number, _hash(ids, key[1]))
        reason: FinishReason = "length" if limit == max_new_tokens else "context"
        requests.append(Request(index, ids, limit, reason, entropy, pictures=pictures))
    return requests


def _hash(ids: Ids, pictures: str) -> int:
    data = np.asarray(ids, np.int64).tobytes() + pictures.encode()
    digest = hashlib.blake2b(data, digest_size=16)
    return int.from_bytes(digest.digest(), "little")


class Draws:
    """Uniform numbers in [0, 1), one for each token of a sample."""

    def __init__(self, entropy: Sequence[int]) -> None:
        # A generator for each sample, not for a batch: samples changed with ``batch_size``, and
        # with its halving after a shortage of memory (decisions/0053).
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
        until = self.until
        text_before_stop = until.text if until is not None and until.has_ended else None
        return Sample(
            tuple(self.ids),
            tuple(self.logps),
            self.finish_reason,
            tuple(self.log_masses),
            text_before_stop=text_before_stop,
        )


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
Settle = Callable[[int, OpenResponse], int]
OnToken = Callable[[Request, int], None]  # called with each token as it is sampled


Prompt = tuple[str | None, tuple[int, ...]]  # the adapter that reads it, and its tokens


def prompt_of(request: Request) -> Prompt:
    """What is computed once for all requests with it."""
    return request.adapter, request.prompt


def distinct(requests: Iterable[Request]) -> list[Prompt]:
    """Their prompts, each once, in order."""
    return list(dict.fromkeys(map(prompt_of, requests)))


@dataclass(frozen=True)
class Chooser:
    """Chooses the next token of each row, and ends the rows that are complete."""

    section: GenerateSection
    stops: frozenset[int]  # tokens that end a response
    decode: Decode | None = None  # finds the section's stop texts; needed if there are any
    has_logps: bool = True  # whether responses have log-probabilities, or zeros

    def opened(self, request: Request) -> OpenResponse:
        """A response without tokens yet."""
        if not self.section.stop:
            return OpenResponse(request)
        if self.decode is None:
            raise ValueError("generate.stop has no effect here: only tokens end a response")
        return OpenResponse(request, TextUntil(self.decode, self.section.stop))

    def advance(
        self,
        logits_BV: torch.Tensor,
        rows: Sequence[OpenResponse],
        settle: Sequence[Settle] = (),
    ) -> list[int]:
        """Append a token to each of ``rows``, from the logits after its last one; the tokens.
        ``settle`` of a row may take another one than was chosen."""
        scores_BV = self.scores(logits_BV, rows)
        if not self.section.do_sample:
            tokens_B, masses = scores_BV.argmax(-1), None
        else:
            tokens_B, masses = self._drawn(scores_BV, rows)
        tokens: list[int] = wait_for_ranks(tokens_B.tolist)
        if settle:
            each = zip(settle, tokens, rows, strict=True)
            tokens = [of_row(token, row) for of_row, token, row in each]
            tokens_B = torch.tensor(tokens, device=scores_BV.device)
        logps, log_masses = [0.0] * len(rows), masses or [None] * len(rows)
        if self.has_logps:
            logps_B = scores_BV.gather(-1, tokens_B[:, None])[:, 0] - scores_BV.logsumexp(-1)
            logps = wait_for_ranks(logps_B.tolist)
        for row, token, logp, mass in zip(rows, tokens, logps, log_masses, strict=True):
            row.add(token, logp, mass, self.stops)
        return tokens

    def scores(self, logits_BV: torch.Tensor, rows: Sequence[OpenResponse]) -> torch.Tensor:
        """[B, V] the logits after penalty and temperature."""
        scores_BV = self._penalized(logits_BV.float(), rows)
        return scores_BV / self.section.temperature if self.section.do_sample else scores_BV

    def _penalized(self, scores_BV: torch.Tensor, rows: Sequence[OpenResponse]) -> torch.Tensor:
        penalty = self.section.repetition_penalty
        if penalty == 1:
            return scores_BV
        seen = [torch.tensor([*row.request.prompt, *row.ids]) for row in rows]
        # transformers ignores ids past the vocabulary
        seen_BT = torch.nn.utils.rnn.pad_sequence(seen, True, scores_BV.shape[1])
        processor = RepetitionPenaltyLogitsProcessor(penalty)
        penalized_BV: torch.Tensor = processor(seen_BT.to(scores_BV.device), scores_BV)
        return penalized_BV

    def _drawn(
        self, scores_BV: torch.Tensor, rows: Sequence[OpenResponse]
    ) -> tuple[torch.Tensor, list[float | None] | None]:
        """[B] sampled tokens, and the logs of the probabilities that they were sampled from."""
        kept_BV, section = scores_BV, self.section
        if section.top_k:
            kept_BV = TopKLogitsWarper(section.top_k)(None, kept_BV)
        if section.top_p < 1:
            kept_BV = TopPLogitsWarper(section.top_p)(None, kept_BV)
        if section.min_p:
            kept_BV = MinPLogitsWarper(section.min_p)(None, kept_BV)
        uniform_B1 = torch.tensor([[row.draws.next()] for row in rows], dtype=torch.float64)
        tokens_B = _inverse(kept_BV, uniform_B1.to(kept_BV.device))
        if kept_BV is scores_BV:
            return tokens_B, None
        masses_B = kept_BV.logsumexp(-1) - scores_BV.logsumexp(-1)
        return tokens_B, wait_for_ranks(masses_B.tolist)


def _inverse(scores_BV: torch.Tensor, uniform_B1: torch.Tensor) -> torch.Tensor:
    """[B] the tokens at which the sums of the probabilities pass the uniform numbers."""
    # In float64: sums of a vocabulary of 150,000 in float32 are off by more than many of its
    # probabilities.
    sums_BV = scores_BV.softmax(-1).cumsum(-1, dtype=torch.float64)
    total_B1 = sums_BV[:, -1:]
    # below the total, so that no token without probability follows
    point_B1 = torch.minimum(uniform_B1 * total_B1, total_B1.nextafter(torch.zeros_like(total_B1)))
    return torch.searchsorted(sums_BV, point_B1, right=True)[:, 0]


Decode = Callable[[Sequence[int]], str]
HOLE = "\ufffd"  # what bytes that are no whole character decode to


def decoder(tokenizer: PreTrainedTokenizerBase, *, hides_special: bool = False) -> Decode:
    """Ids to the exact text of the model: special tokens shown (or hidden), spaces unchanged."""
    options = {"clean_up_tokenization_spaces": False, "skip_special_tokens": hides_special}

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), **options))

    return decode


class TextStream:
    """Feed ids one by one; returns text as soon as it can no longer change.

    Text is decoded from the last complete piece on, and held back while it ends in an incomplete
    character.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._before: list[int] = []  # the last ids shown: context for what follows
        self._held: list[int] = []  # ids that are not shown yet

    def push(self, token_id: int) -> str:
        """The text that is now complete; often one word, sometimes nothing."""
        self._held.append(token_id)
        text = self._text()
        if not text or text.endswith(HOLE):
            return ""
        self._before, self._held = self._held, []
        return text

    @property
    def begun(self) -> str:
        """The complete characters of what is held back."""
        return self._text().rstrip(HOLE) if self._held else ""

    def end(self) -> str:
        """The text that was held back, including incomplete characters."""
        text = self._text()
        self._before, self._held = [], []
        return text

    def _text(self) -> str:
        return self._decode(self._before + self._held)[len(self._decode(self._before)) :]


class TextUntil:
    """The text of a response up to the first of some stop texts. Feed ids one by one.

    A stop text ends a response, wherever in a token it begins and ends. What may be its beginning
    is held back, too.
    """

    def __init__(self, decode: Decode, stop: Sequence[str]) -> None:
        self._stream, self._stop = TextStream(decode), tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._num_shown = 0
        self.text = ""  # complete characters, without the stop text
        self.has_ended = False  # by a stop text

    def push(self, token_id: int) -> bool:
        """Add a token; whether it completes a stop text."""
        start = max(0, len(self.text) - self._longest + 1)  # what is before has been searched
        self.text += self._stream.push(token_id)
        seen = self.text + self._stream.begun
        if places := [at for stop in self._stop if (at := seen.find(stop, start)) >= 0]:
            self.text, self.has_ended = seen[: min(places)], True
        return self.has_ended

    def pop(self) -> str:
        """The text to show since the last call: no stop text can begin in it."""
        return self._shown(len(self.text) - (0 if self.has_ended else self._num_held()))

    def end(self) -> str:
        """The rest of the text, including incomplete characters, once there are no more tokens."""
        if not self.has_ended:
            self.text += self._stream.end()
        return self._shown(len(self.text))

    def _shown(self, end: int) -> str:
        piece, self._num_shown = self.text[self._num_shown : end], end
        return piece

    def _num_held(self) -> int:
        """Characters at the end that may be the beginning of a stop text."""
        sizes = ((n, stop[:n]) for stop in self._stop for n in range(1, len(stop)))
        return max((n for n, start in sizes if self.text.endswith(start)), default=0)


def agree(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether logits differ by no more than roundings."""
    # in few bits, sums in another order may differ by more
    is_wide = expected.dtype == torch.float32 and not torch.is_autocast_enabled(
        expected.device.type
    )
    share = 1e-3 if is_wide else 0.1
    largest_difference = float((actual.float() - expected.float()).abs().max())
    return largest_difference <= share * float(expected.float().abs().max())
