"""Logits to tokens: penalty, temperature, top_k, top_p and min_p in transformers' order and by its
own functions, then one uniform number for each row.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .decode import Decode, TextUntil
from .requests import OpenResponse, Request
from .section import GenerateSection


@dataclass(frozen=True)
class Chooser:
    """Chooses the next token of each row, and ends the rows that are complete."""

    section: GenerateSection
    stops: frozenset[int]  # tokens that end a response
    decode: Decode | None = None  # finds the section's stop texts; needed if there are any

    def opened(self, request: Request) -> OpenResponse:
        """A response without tokens yet."""
        if not self.section.stop:
            return OpenResponse(request)
        if self.decode is None:
            raise ValueError("generate.stop has no effect here: only tokens end a response")
        return OpenResponse(request, TextUntil(self.decode, self.section.stop))

    def advance(self, logits_BV: torch.Tensor, rows: Sequence[OpenResponse]) -> list[int]:
        """Append a token to each of ``rows``, from the logits after its last one; the tokens."""
        scores_BV = self.scores(logits_BV, rows)
        if not self.section.do_sample:
            tokens_B, masses = scores_BV.argmax(-1), None
        else:
            tokens_B, masses = self._drawn(scores_BV, rows)
        logps_B = scores_BV.gather(-1, tokens_B[:, None])[:, 0] - scores_BV.logsumexp(-1)
        tokens: list[int] = tokens_B.tolist()
        found = masses or [None] * len(rows)
        for row, token, logp, mass in zip(rows, tokens, logps_B.tolist(), found, strict=True):
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
        found: torch.Tensor = processor(seen_BT.to(scores_BV.device), scores_BV)
        return found

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
        return tokens_B, (kept_BV.logsumexp(-1) - scores_BV.logsumexp(-1)).tolist()


def _inverse(scores_BV: torch.Tensor, uniform_B1: torch.Tensor) -> torch.Tensor:
    """[B] the tokens at which the sums of the probabilities pass the uniform numbers."""
    sums_BV = scores_BV.softmax(-1).cumsum(-1, dtype=torch.float64)
    total_B1 = sums_BV[:, -1:]
    # below the total, so that no token without probability follows
    point_B1 = torch.minimum(uniform_B1 * total_B1, total_B1.nextafter(torch.zeros_like(total_B1)))
    return torch.searchsorted(sums_BV, point_B1, right=True)[:, 0]
