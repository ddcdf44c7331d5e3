"""Log-probabilities of continuations, with the tokens that prompts share computed once.

Questions are sorted into families, whose prompts begin alike (with the examples of a benchmark, for
one). The keys and values of that beginning, the stem, are computed once, and stand before every row
of the family. A row is the rest of a prompt and one continuation, padded on the right, where
nothing that counts sees the padding. Continuations of one token are read from any row of their
question.

Shapes: B rows, K columns whose logits are computed, N tokens of continuations, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import torch
from torch import nn
from transformers import DynamicCache

from ..errors import first_line
from ..log import fell_back
from ..parallel.progress import wait_for_ranks
from ._proof import must_be_alone
from ._slots import Prefix, cache_argument, inner_model, longest_limit, masked_attention
from .section import Ids

_TRIED = "shares_stems_of_prompts"  # an attribute of models that have been tried
# Questions of a benchmark begin with the same examples: computed once for all, not once for every
# choice of every question, as lm-eval's own backend does (decisions/0061).
_LEAST = 32  # tokens of a stem
_WORTH = 512  # tokens that a stem must save, for a pass of its own and rows in smaller batches
_TOKENS = 8192  # of a pass
_COLUMNS = 2048  # of a pass whose logits are computed
_PADDING = 128  # tokens of padding for which rows get no passes of their own


@dataclass(frozen=True)
class Question:
    """A prompt of one token at least, and continuations of it, none of them empty."""

    prompt: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]

    @property
    def longest(self) -> int:
        """Tokens of the prompt with its longest continuation."""
        return len(self.prompt) + max(map(len, self.continuations))


@dataclass(frozen=True)
class Likelihood:
    """The log-probability of a continuation."""

    logp: float  # the sum over its tokens, in nats
    is_greedy: bool  # whether each token is the most probable one


class LikelihoodStore(Protocol):
    """Likelihoods that outlive this process, by the index of the question."""

    @property
    def known(self) -> Mapping[int, list[Likelihood]]:
        """Those of an earlier attempt; the same on all ranks."""

    def add(self, likelihoods: Mapping[int, list[Likelihood]]) -> None:
        """Store some."""


@dataclass(frozen=True)
class _Row:
    """The rest of a prompt behind a stem, and a continuation without its last token."""

    index: int  # of the question
    ids: tuple[int, ...]
    num_own: int  # those of the prompt
    answers: tuple[int, ...]  # the continuations that are read from it, by number


@torch.no_grad()
def likelihoods(
    model: nn.Module, questions: Sequence[Question], *, batch_size: int
) -> Iterator[tuple[int, list[Likelihood]]]:
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
    is_alone = must_be_alone(model, longest)
    batch_size = 1 if is_alone else batch_size
    missing = {i: len(question.continuations) for i, question in enumerate(questions)}
    computed = dict[tuple[int, int], Likelihood]()
    with masked_attention(inner_model(model)):
        shares = not is_alone and _shares_stems(model, longest)
        for stem, members in _families(questions, shares=shares):
            prefix = _prefix(model, stem)
            for rows in _batches(questions, members, len(stem), batch_size):
                for place, likelihood in _run(model, prefix, rows, questions):
                    computed[place] = likelihood
                    missing[place[0]] -= 1
                for index in dict.fromkeys(row.index for row in rows):
                    if not missing[index]:
                        count = len(questions[index].continuations)
                        yield index, [computed.pop((index, n)) for n in range(count)]


def share_of(questions: Sequence[Question], index: int, count: int) -> list[int]:
    """The questions of replica ``index`` of ``count``: prompts that begin alike stay together."""
    order = sorted(range(len(questions)), key=lambda i: questions[i].prompt)
    return order[index * len(order) // count : (index + 1) * len(order) // count]


def _families(questions: Sequence[Question], *, shares: bool) -> Iterator[tuple[Ids, list[int]]]:
    """Questions whose prompts begin alike, and that stem; it is empty for all that share none. The
    last token of a prompt is never in it: its logits are needed."""
    prompts = [question.prompt for question in questions]
    order, alone = sorted(range(len(prompts)), key=lambda i: prompts[i]), list[int]()
    start = 0
    while start < len(order):
        end, stem = start + 1, 0
        most = len(prompts[order[start]]) - 1
        while end < len(order) and shares:
            ahead = prompts[order[end]]
            shared = min(most, _shared(prompts[order[end - 1]], ahead), len(ahead) - 1)
            if shared < max(_LEAST, stem / 2):
                break
            stem = most = shared
            end += 1
        members, start = order[start:end], end
        if stem * (len(members) - 1) >= _WORTH:
            yield prompts[members[0]][:stem], members
        else:
            alone += members
    yield (), alone


def _shared(ids: Ids, other: Ids) -> int:
    pairs = zip(ids, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _batches(
    questions: Sequence[Question], members: Sequence[int], stem: int, batch_size: int
) -> Iterator[list[_Row]]:
    """The rows of some questions, in batches of similar lengths."""
    rows = [row for index in members for row in _rows(index, questions[index], stem)]
    batch: list[_Row] = []
    for row in sorted(rows, key=lambda row: (-len(row.ids), row.index)):
        if batch and (len(batch) == batch_size or _is_wasteful([*batch, row])):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _rows(index: int, question: Question, stem: int) -> Iterator[_Row]:
    """A row for each continuation of several tokens, or one for all."""
    prompt_rest, answers = question.prompt[stem:], question.continuations
    short = tuple(n for n, ids in enumerate(answers) if len(ids) == 1)
    rows: list[tuple[int, ...]] = [(n,) for n, ids in enumerate(answers) if len(ids) > 1]
    first, *others = rows or [()]
    for numbers in ((*first, *short), *others):
        yield _Row(index, (*prompt_rest, *answers[numbers[0]][:-1]), len(prompt_rest), numbers)


def _columns(rows: Sequence[_Row]) -> int:
    """The last columns of a pass that have all predictions of continuations."""
    return max(len(row.ids) for row in rows) - min(row.num_own for row in rows) + 1


def _is_wasteful(rows: Sequence[_Row]) -> bool:
    """Whether a pass of ``rows`` has too many tokens or logits, or too much padding among them."""
    padded = max(len(row.ids) for row in rows) * len(rows)
    is_large = padded > _TOKENS or _columns(rows) * len(rows) > _COLUMNS
    return is_large or padded > 1.3 * sum(len(row.ids) for row in rows) + _PADDING


def _prefix(model: nn.Module, stem: Ids) -> Prefix:
    """The keys and values of a stem, [H, P, E] of each layer."""
    cache, inner = DynamicCache(), inner_model(model)
    if stem:
        ids = torch.tensor([list(stem)], device=inner.device)
        _logits(model, 1, input_ids=ids, use_cache=True, **{cache_argument(inner): cache})
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def _run(
    model: nn.Module, prefix: Prefix, rows: Sequence[_Row], questions: Sequence[Question]
) -> Iterator[tuple[tuple[int, int], Likelihood]]:
    """The likelihoods of the continuations in ``rows``, by question and number."""
    width, num_kept = max(len(row.ids) for row in rows), _columns(rows)
    inner, cache = inner_model(model), DynamicCache()
    for layer, (keys, values) in enumerate(prefix):  # every row begins with it
        cache.update(*(each.expand(len(rows), *each.shape) for each in (keys, values)), layer)
    cache_arguments: dict[str, object] = {"use_cache": bool(prefix)}
    if prefix:
        cache_arguments[cache_argument(inner)] = cache
    ids = torch.tensor([[*row.ids, *[0] * (width - len(row.ids))] for row in rows])
    logits_BKV = _logits(model, num_kept, input_ids=ids.to(inner.device), **cache_arguments)
    places = [(number, row, n) for number, row in enumerate(rows) for n in row.answers]
    answers = [questions[row.index].continuations[n] for _, row, n in places]
    at = [number for (number, _, _), answer in zip(places, answers, strict=True) for _ in answer]
    columns = [
        row.num_own - 1 - (width - num_kept) + i
        for (_, row, _), answer in zip(places, answers, strict=True)
        for i in range(len(answer))
    ]
    logits_NV = logits_BKV[at, columns]
    wide = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    tokens_N = torch.tensor([token for answer in answers for token in answer], device=inner.device)
    logps_N = wide.log_softmax(-1).gather(-1, tokens_N[:, None])[:, 0].double()
    logps: list[float] = wait_for_ranks(logps_N.tolist)
    best: list[bool] = wait_for_ranks((logits_NV.argmax(-1) == tokens_N).tolist)
    start = 0
    for (_, row, n), answer in zip(places, answers, strict=True):
        span = slice(start, start := start + len(answer))
        yield (row.index, n), Likelihood(sum(logps[span]), all(best[span]))


def _logits(model: nn.Module, num_kept: int, **arguments: object) -> torch.Tensor:
    """[B, K, V] the logits of the last ``num_kept`` columns."""
    names = inspect.signature(inner_model(model).forward).parameters
    last_columns = {"logits_to_keep": num_kept} if "logits_to_keep" in names else {}
    # some architectures compute all columns, whatever they are asked for
    logits_BTV: torch.Tensor = model(**arguments, **last_columns).logits
    return logits_BTV[:, -num_kept:]


def _shares_stems(model: nn.Module, longest: int) -> bool:
    """Whether rows behind a stem have the likelihoods of rows with their prompts. Tried once for
    each model, with a stem that is longer than the windows that rows of ``longest`` tokens
    exceed."""
    inner = inner_model(model)
    config, kernel = inner.config.get_text_config(), inner.config._attn_implementation
    limit = longest_limit(config, longest)
    trials: dict[tuple[str, int], bool] = vars(inner).setdefault(_TRIED, {})
    if (kernel, limit) not in trials:
        why = _why_not(model, config.vocab_size, limit + 4)
        trials[kernel, limit] = why is None
        if why is not None:
            what = f"{type(inner).__name__}: each continuation is computed with its prompt"
            fell_back(what, f"what prompts share cannot be computed once: {why}", "takes longer")
    return trials[kernel, limit]


def _why_not(model: nn.Module, vocabulary: int, length: int) -> str | None:
    """Why rows behind a stem of this ``length`` do not give the likelihoods of plain rows; None if
    they do."""
    ids = tuple((7 * n + 3) % vocabulary for n in range(length + 9))
    question = Question(ids[: length + 2], (ids[-4:], ids[-2:]))
    rows_behind_stem, full_rows = (list(_rows(0, question, stem)) for stem in (length, 0))
    try:
        with_stem = dict(_run(model, _prefix(model, ids[:length]), rows_behind_stem, [question]))
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # any model's code: what is wrong in it will show in plain rows
        return f"its code fails ({first_line(error)})"
    # in few bits, sums in another order may differ by more
    share = 1e-4 if inner_model(model).dtype == torch.float32 else 0.1
    for place, expected in _run(model, [], full_rows, [question]):
        if abs(with_stem[place].logp - expected.logp) > share * max(1.0, abs(expected.logp)):
            return "a trial gave other likelihoods"
    return None
