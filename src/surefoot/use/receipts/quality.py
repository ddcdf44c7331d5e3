"""How much quality an artefact has lost, on rows that the run has held out.

All figures are of one forward pass for each row. A response matches exactly if every one of its
tokens is the most probable one after those before it: then greedy generation writes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional as F

from ...data.text.pairs import with_chosen
from ...errors import RecipeError
from ..evaluation import encoded
from ..held_out_set import held_out
from ..model_loading import ModelFolders, codec_of

_ROWS, _TOKENS = 64, 4096  # at most, of all rows together
_MASKED = -100


@dataclass(frozen=True)
class HeldOutRow:
    """A held-out row."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True)
class RowScores:
    """What a model computes of the rows."""

    loss: float  # nats per trained token
    matches: int
    predicted: Sequence[torch.Tensor]  # of each row, the most probable token at every trained one


@dataclass(frozen=True)
class Quality:
    """An artefact beside the checkpoint."""

    num_rows: int
    num_tokens: int
    perplexity: float
    checkpoint_perplexity: float
    exact_match: float
    checkpoint_exact_match: float
    token_agreement: float

    def as_data(self) -> dict[str, Any]:
        """For the receipt; what is infinite is null."""
        return {n: v if math.isfinite(v) else None for n, v in asdict(self).items()}

    def __str__(self) -> str:
        return (
            f"perplexity {self.perplexity:.3f}, of the checkpoint {self.checkpoint_perplexity:.3f};"
            f" exact match {self.exact_match:.1%}, {self.checkpoint_exact_match:.1%}; "
            f"{self.token_agreement:.1%} of the most probable tokens are equal "
            f"({self.num_rows} held-out rows, {self.num_tokens:,} tokens)"
        )


def held_out_rows(parts: ModelFolders) -> list[HeldOutRow]:
    """Rows that the run of ``parts`` was not trained on. Raises ``RecipeError`` if it held out
    none, ``DataError`` if they cannot be read any more."""
    if parts.recipe is None:
        raise RecipeError("no recipe is beside the checkpoint")
    codec, left = codec_of(parts), _TOKENS
    found: list[HeldOutRow] = []
    for part in held_out(parts.recipe, codec, limit=_ROWS):
        for item in encoded(parts.recipe.stage, part.examples, codec):
            chat = with_chosen(item)
            ids, labels = chat.get("input_ids"), chat.get("labels")
            if ids is None or labels is None or len(ids) > left or len(found) == _ROWS:
                continue
            left -= len(ids)
            found.append(HeldOutRow(tuple(map(int, ids)), tuple(map(int, labels))))
    if not found:
        raise RecipeError(f"no held-out row has at most {_TOKENS:,} tokens with a response")
    return found


@torch.no_grad()
def scores(model: Any, rows: Sequence[HeldOutRow]) -> RowScores:
    """Of a transformers model, each row by itself."""
    loss, count, matches, predicted = 0.0, 0, 0, []
    for row in rows:
        ids = torch.tensor([row.ids], device=next(model.parameters()).device)
        labels = torch.tensor(row.labels[1:])
        kept = labels != _MASKED
        logits_TV = model(input_ids=ids).logits[0].float().cpu()[:-1][kept]
        loss += float(F.cross_entropy(logits_TV, labels[kept], reduction="sum"))
        best = logits_TV.argmax(-1)
        matches += bool((best == labels[kept]).all())
        count += len(best)
        predicted.append(best)
    return RowScores(loss / max(1, count), matches, predicted)


def quality_of(found: RowScores, expected: RowScores) -> Quality:
    """The artefact's scores beside the checkpoint's."""
    own, theirs = torch.cat(list(found.predicted)), torch.cat(list(expected.predicted))
    rows = len(found.predicted)
    return Quality(
        rows,
        len(own),
        _exp(found.loss),
        _exp(expected.loss),
        found.matches / rows,
        expected.matches / rows,
        float((own == theirs).double().mean()),
    )


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
