"""Passes over rows of continuations, and whether an architecture takes such rows.

A pass has rows behind one stem, the beginning that all their prompts share. A row is the rest of a
prompt and then all of its continuations. Each of these sees the prompt and itself, by a mask, and
its positions begin where the prompt ends.

Shapes: B rows, T tokens of a row, P tokens of the stem, K columns whose logits are computed, V
vocabulary.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache

from ...errors import first_line
from ..driver import Prefix, cache_argument, inner_model, masked_attention
from ..masks import candidates, longest_limit
from ..samples import Ids

logger = logging.getLogger(__name__)
_TRIED = "takes_continuations_in_rows"  # an attribute of models that have been tried
Scored = tuple[int, list["Likelihood"]]  # the index of a question, and what was found
MaskNames = Sequence[str]  # layer types that each take a mask; "" for all layers


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


@dataclass(frozen=True)
class ContinuationRow:
    """Some continuations of a question, in one row behind ``stem`` tokens of its prompt."""

    index: int  # of the question
    own: tuple[int, ...]  # the rest of the prompt
    first: int  # the number of the first continuation
    continuations: tuple[tuple[int, ...], ...]

    @property
    def num_tail(self) -> int:
        """Tokens behind the prompt: the last of a continuation predicts nothing."""
        return sum(len(one) - 1 for one in self.continuations)


@dataclass
class _Columns:
    """Where the tokens of all continuations of a pass are predicted."""

    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)  # of the K
    tokens: list[int] = field(default_factory=list)
    owners: list[tuple[int, int, int]] = field(default_factory=list)  # question, number, tokens


@dataclass
class Stem:
    """Tokens that the prompts of several passes begin with; computed with the first of these."""

    ids: tuple[int, ...]
    prefix: Prefix | None = None

    def computed(self, model: nn.Module) -> Prefix:
        """Its keys and values, [H, P, E] of each layer."""
        if self.prefix is None:
            self.prefix = _prefix(model, self.ids) if self.ids else []
        return self.prefix


def run_pass(
    model: nn.Module, names: MaskNames, stem: Stem, rows: Sequence[ContinuationRow]
) -> Iterator[tuple[tuple[int, int], Likelihood]]:
    """The likelihoods of the continuations in ``rows``, by question and number."""
    num_own = max(len(row.own) for row in rows)
    num_tail = max(row.num_tail for row in rows)
    ids, positions, parts = (np.zeros((len(rows), num_own + num_tail), np.int64) for _ in range(3))
    at = _Columns()
    for number, row in enumerate(rows):
        views = ids[number], positions[number], parts[number]
        _lay(row, number, num_own, len(stem.ids), views, at)
    device = inner_model(model).device
    cache = _cache(stem.computed(model), len(rows))
    mask = _mask(model, torch.from_numpy(parts).to(device), len(stem.ids))
    logits_BKV = _logits(
        model,
        num_tail + 1,
        input_ids=torch.from_numpy(ids).to(device),
        attention_mask=mask if list(names) == [""] else dict.fromkeys(names, mask),
        position_ids=torch.from_numpy(positions).to(device),
        use_cache=True,
        **cache_argument(inner_model(model), cache),
    )
    yield from _read(logits_BKV, at)


def _lay(
    row: ContinuationRow,
    number: int,
    num_own: int,
    num_stem: int,
    views: tuple[np.ndarray, np.ndarray, np.ndarray],
    at: _Columns,
) -> None:
    """Write a row: its prompt ends at column ``num_own``, its continuations follow."""
    ids, positions, parts = views
    length = num_stem + len(row.own)
    own = slice(num_own - len(row.own), num_own)
    parts[: own.start] = -1  # padding
    ids[own], positions[own] = row.own, np.arange(num_stem, length)
    end = num_own
    for part, one in enumerate(row.continuations, start=1):
        start, end = end, end + len(one) - 1
        ids[start:end], parts[start:end] = one[:-1], part
        positions[start:end] = np.arange(length, length + len(one) - 1)
        at.rows += [number] * len(one)
        at.columns += [0, *range(start - num_own + 1, end - num_own + 1)]
        at.tokens += one
        at.owners.append((row.index, row.first + part - 1, len(one)))
    parts[end:] = -1


def _mask(model: nn.Module, parts_BT: torch.Tensor, num_stem: int) -> torch.Tensor:
    """[B, 1, T, P + T] what each token sees: the stem, the prompt, and what is before it in its
    part."""
    inner = inner_model(model)
    count, length = parts_BT.shape
    same = parts_BT[:, :, None] == parts_BT[:, None, :]
    before = torch.ones(length, length, dtype=torch.bool, device=parts_BT.device).tril()
    seen = before & (same | (parts_BT == 0)[:, None, :])
    stem = torch.ones(count, length, num_stem, dtype=torch.bool, device=parts_BT.device)
    mask = torch.cat([stem, seen], dim=-1)[:, None]
    if inner.config._attn_implementation != "eager":
        return mask
    hidden = torch.zeros(mask.shape, dtype=inner.dtype, device=mask.device)
    return hidden.masked_fill(~mask, torch.finfo(inner.dtype).min)


def _prefix(model: nn.Module, ids: Ids) -> Prefix:
    """The keys and values of ``ids`` in each layer."""
    cache = DynamicCache()
    inner = inner_model(model)
    here = torch.tensor([list(ids)], device=inner.device)
    _logits(model, 1, input_ids=here, use_cache=True, **cache_argument(inner, cache))
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def _cache(prefix: Prefix, count: int) -> DynamicCache:
    """A cache of ``count`` rows that all begin with ``prefix``."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(prefix):
        cache.update(*(each.expand(count, *each.shape) for each in (keys, values)), layer)
    return cache


def _logits(model: nn.Module, num_kept: int, **arguments: object) -> torch.Tensor:
    """[B, K, V] the logits of the last ``num_kept`` columns."""
    names = inspect.signature(inner_model(model).forward).parameters
    kept = {"logits_to_keep": num_kept} if "logits_to_keep" in names else {}
    found: torch.Tensor = model(**arguments, **kept).logits
    return found[:, -num_kept:]


def _read(logits_BKV: torch.Tensor, at: _Columns) -> Iterator[tuple[tuple[int, int], Likelihood]]:
    """The likelihood of each continuation, in float32."""
    device = logits_BKV.device
    rows, columns, tokens = (
        torch.tensor(part, device=device) for part in (at.rows, at.columns, at.tokens)
    )
    wide = logits_BKV.float() if logits_BKV.dtype != torch.float64 else logits_BKV
    norms_BK = torch.stack([row.logsumexp(-1) for row in wide])
    logps = (wide[rows, columns, tokens] - norms_BK[rows, columns]).double().tolist()
    best = (logits_BKV.argmax(-1)[rows, columns] == tokens).tolist()
    start = 0
    for index, number, count in at.owners:
        own = slice(start, start + count)
        yield (index, number), Likelihood(sum(logps[own]), all(best[own]))
        start += count


def one_by_one(
    model: nn.Module, questions: Sequence[Question], batch_size: int
) -> Iterator[Scored]:
    """A row for each continuation, padded on the right, in plain passes."""
    for index, question in enumerate(questions):
        found: list[Likelihood] = []
        for start in range(0, len(question.continuations), batch_size):
            group = question.continuations[start : start + batch_size]
            found += _plainly(model, question.prompt, group)
        yield index, found


def _plainly(
    model: nn.Module, prompt: tuple[int, ...], continuations: Sequence[tuple[int, ...]]
) -> Iterator[Likelihood]:
    length = len(prompt) - 1 + max(map(len, continuations))
    rows = [[*prompt, *one[:-1]] for one in continuations]
    ids = [[*row, *[0] * (length - len(row))] for row in rows]
    kept, at = max(map(len, continuations)), _Columns()
    for number, one in enumerate(continuations):
        at.rows += [number] * len(one)
        at.columns += range(len(one))
        at.tokens += one
        at.owners.append((0, number, len(one)))
    here = torch.tensor(ids, device=inner_model(model).device)
    logits_BKV = _logits(model, kept, input_ids=here, use_cache=False)
    yield from (one for _, one in _read(logits_BKV, at))


def mask_names(model: nn.Module, longest: int) -> MaskNames | None:
    """The layer types for which the model takes masks of rows with several continuations, or None
    if it takes none, or hides more than the future from a row of ``longest`` tokens."""
    inner = inner_model(model)
    config = inner.config.get_text_config()
    limit, kernel = longest_limit(config, longest), inner.config._attn_implementation
    known: dict[tuple[str, int], MaskNames | None]
    known = vars(inner).setdefault(_TRIED, {})
    if (kernel, limit) not in known:
        with masked_attention(inner):
            known[kernel, limit], why = _right_names(model, longest, limit)
        if known[kernel, limit] is None:
            logger.warning(
                "%s: continuations of a prompt cannot share a row, so each is computed with its "
                "prompt, which takes longer: %s",
                type(inner).__name__,
                why,
            )
    return known[kernel, limit]


def _right_names(model: nn.Module, longest: int, limit: int) -> tuple[MaskNames | None, str]:
    """Those that give the right likelihoods, or why there are none. A window is not among them: it
    counts columns."""
    why = "not all layers have keys and values of all tokens"
    for masks in candidates(inner_model(model).config.get_text_config()):
        windows = [window for window in masks.windows.values() if window is not None]
        if min(windows, default=longest) < longest:
            why = f"its window of {min(windows)} tokens is shorter than a row of {longest}"
            continue
        problem = _why_not(model, tuple(masks.windows), limit)
        if problem is None:
            return tuple(masks.windows), ""
        why = problem
    return None, why


def _why_not(model: nn.Module, names: MaskNames, limit: int) -> str | None:
    """Why rows behind a stem of more than ``limit`` tokens, with several continuations, do not give
    the likelihoods of plain passes; None if they do."""
    vocabulary = inner_model(model).config.get_text_config().vocab_size
    ids = [(7 * n + 3) % vocabulary for n in range(24)]
    stem = tuple((11 * n + 5) % vocabulary for n in range(limit + 4))
    prompts = (*stem, *ids[4:6]), (*stem, *ids[8:13])
    asked = [
        Question(prompts[0], (tuple(ids[13:14]), tuple(ids[14:17]))),
        Question(prompts[1], (tuple(ids[17:19]), tuple(ids[19:23]), tuple(ids[20:22]))),
    ]
    rows = [
        ContinuationRow(i, q.prompt[limit + 4 :], 0, q.continuations) for i, q in enumerate(asked)
    ]
    try:
        found = dict(run_pass(model, names, Stem(stem), rows))
        plain = dict(one_by_one(model, asked, 8))
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # any model's code: what is wrong in it will show in plain passes
        return first_line(error)
    pairs = [(found[i, n].logp, one.logp) for i in plain for n, one in enumerate(plain[i])]
    # in few bits, sums in another order may differ by more
    share = 1e-4 if inner_model(model).dtype == torch.float32 else 0.1
    is_right = all(abs(one - other) <= share * max(1.0, abs(other)) for one, other in pairs)
    return None if is_right else "a trial gave other likelihoods"
