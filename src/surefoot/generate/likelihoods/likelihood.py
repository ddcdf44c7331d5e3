"""Log-probabilities of continuations, with the tokens that prompts share computed once.

Questions are sorted into families, whose prompts begin alike (with the examples of a benchmark, for
one). That beginning, the stem, is computed once, and each question once for all continuations.
Architectures that take no such rows get a row for each continuation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Protocol

import torch
from torch import nn

from ..driver import inner_model, masked_attention
from ..proof import must_be_alone
from ..samples import Ids
from .rows import (
    ContinuationRow,
    Likelihood,
    Question,
    Scored,
    Stem,
    mask_names,
    one_by_one,
    run_pass,
)

__all__ = ["Likelihood", "LikelihoodStore", "Question", "likelihoods", "share_of"]
_LEAST = 32  # tokens of a stem
_WORTH = 512  # tokens that a stem must save, for a pass of its own and rows in smaller batches
_TOKENS = 8192  # of a pass
_PADDING = 128  # tokens of padding for which rows get no passes of their own
_ROW = 2048  # tokens of the continuations in a row


class LikelihoodStore(Protocol):
    """Likelihoods that outlive this process, by the index of the question."""

    @property
    def known(self) -> Mapping[int, list[Likelihood]]:
        """Those of an earlier attempt; the same on all ranks."""

    def add(self, found: Mapping[int, list[Likelihood]]) -> None:
        """Store some."""


def share_of(questions: Sequence[Question], index: int, count: int) -> list[int]:
    """The questions of replica ``index`` of ``count``: prompts that begin alike stay together."""
    order = sorted(range(len(questions)), key=lambda i: questions[i].prompt)
    return order[index * len(order) // count : (index + 1) * len(order) // count]


@torch.no_grad()
def likelihoods(
    model: nn.Module, questions: Sequence[Question], *, batch_size: int
) -> Iterator[Scored]:
    """The likelihoods of the continuations of each question, with its index, as they are computed.
    No question may have more tokens than the model has positions.

    Args:
        model: in evaluation mode.
        questions: prompts with their continuations.
        batch_size: most rows of a pass.
    """
    if not questions:
        return
    longest = max(question.longest for question in questions)
    if must_be_alone(model, longest):
        names, batch_size = None, 1
    else:
        names = mask_names(model, longest)
    if names is None:
        yield from one_by_one(model, questions, batch_size)
        return
    missing = {i: len(question.continuations) for i, question in enumerate(questions)}
    found = dict[tuple[int, int], Likelihood]()
    with masked_attention(inner_model(model)):
        for stem, rows in _passes(questions, batch_size):
            for place, one in run_pass(model, names, stem, rows):
                found[place] = one
                missing[place[0]] -= 1
            for index in dict.fromkeys(row.index for row in rows):
                if not missing[index]:
                    count = len(questions[index].continuations)
                    yield index, [found.pop((index, n)) for n in range(count)]


def _passes(
    questions: Sequence[Question], batch_size: int
) -> Iterator[tuple[Stem, list[ContinuationRow]]]:
    """Rows that share a pass, by stem."""
    alone: list[int] = []
    for length, members in _families([question.prompt for question in questions]):
        if not length:
            alone += members
            continue
        stem = Stem(questions[members[0]].prompt[:length])
        yield from ((stem, rows) for rows in _batches(questions, members, length, batch_size))
    yield from ((Stem(()), rows) for rows in _batches(questions, alone, 0, batch_size))


def _families(prompts: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, list[int]]]:
    """Prompts with a common beginning, and its length; 0 of those that share none. The last token
    of a prompt is never in it: its logits are needed."""
    order = sorted(range(len(prompts)), key=lambda i: prompts[i])
    start = 0
    while start < len(order):
        end, stem = start + 1, 0
        most = len(prompts[order[start]]) - 1
        while end < len(order):
            ahead = prompts[order[end]]
            shared = min(most, _shared(prompts[order[end - 1]], ahead), len(ahead) - 1)
            if shared < max(_LEAST, stem / 2):
                break
            stem = most = shared
            end += 1
        is_worth = stem * (end - start - 1) >= _WORTH
        yield stem if is_worth else 0, order[start:end]
        start = end


def _shared(one: Ids, other: Ids) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _batches(
    questions: Sequence[Question], members: Sequence[int], stem: int, batch_size: int
) -> Iterator[list[ContinuationRow]]:
    """The rows of some questions, in batches of similar lengths."""
    rows = [row for index in members for row in _rows(index, questions[index], stem)]
    batch: list[ContinuationRow] = []
    for row in sorted(rows, key=lambda row: (-len(row.own) - row.num_tail, row.index)):
        if batch and (len(batch) == batch_size or _is_wasteful([*batch, row])):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _is_wasteful(rows: Sequence[ContinuationRow]) -> bool:
    """Whether a pass of ``rows`` has too many tokens, or too much padding among them."""
    width = max(len(row.own) for row in rows) + max(row.num_tail for row in rows)
    count = sum(len(row.own) + row.num_tail for row in rows)
    padded = width * len(rows)
    return padded > _TOKENS or padded > 1.3 * count + _PADDING


def _rows(index: int, question: Question, stem: int) -> Iterator[ContinuationRow]:
    """One row, or several if the continuations have very many tokens."""
    own, start, count = question.prompt[stem:], 0, 0
    for number, one in enumerate(question.continuations):
        if number > start and count + len(one) - 1 > _ROW:
            yield ContinuationRow(index, own, start, question.continuations[start:number])
            start, count = number, 0
        count += len(one) - 1
    yield ContinuationRow(index, own, start, question.continuations[start:])
