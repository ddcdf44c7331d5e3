"""The losses of preference pairs by name. To add one: write its function, add its line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import preferences

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Pairs:
    """P pairs of responses, as a loss reads them, and its settings."""

    chosen: torch.Tensor  # [P] log-ratio to the reference, or log-probability without one
    rejected: torch.Tensor  # [P]
    nll: torch.Tensor  # [P] negative log-likelihood of the chosen response, per token
    beta: float
    gamma: float
    label_smoothing: float

    @property
    def margins(self) -> torch.Tensor:
        """[P] by how much the chosen response is ahead."""
        return self.chosen - self.rejected


@dataclass(frozen=True)
class PairLoss:
    """A loss [P] of pairs, and what it reads."""

    compute: Callable[[Pairs], torch.Tensor]
    per_token: bool = False  # mean log-probabilities of a response, not their sum
    needs_reference: bool = True
    has_likelihood: bool = False  # of the chosen response, as a part
    settings: Collection[str] = ()  # that it has beside beta


LOSSES: Mapping[str, PairLoss] = {
    "sigmoid": PairLoss(
        lambda p: preferences.sigmoid(p.margins, p.beta, p.label_smoothing),
        settings=("label_smoothing",),
    ),
    "sigmoid_norm": PairLoss(
        lambda p: preferences.sigmoid(p.margins, p.beta, p.label_smoothing),
        per_token=True,
        settings=("label_smoothing",),
    ),
    "robust": PairLoss(
        lambda p: preferences.robust(p.margins, p.beta, p.label_smoothing),
        settings=("label_smoothing",),
    ),
    "exo_pair": PairLoss(
        lambda p: preferences.exo_pair(p.margins, p.beta, p.label_smoothing),
        settings=("label_smoothing",),
    ),
    "hinge": PairLoss(lambda p: preferences.hinge(p.margins, p.beta)),
    "ipo": PairLoss(lambda p: preferences.ipo(p.margins, p.beta), per_token=True),
    "apo_zero": PairLoss(lambda p: preferences.apo_zero(p.chosen, p.rejected, p.beta)),
    "apo_down": PairLoss(lambda p: preferences.apo_down(p.chosen, p.rejected, p.beta)),
    "nca_pair": PairLoss(lambda p: preferences.nca_pair(p.chosen, p.rejected, p.beta)),
    "sppo_hard": PairLoss(lambda p: preferences.sppo_hard(p.chosen, p.rejected, p.beta)),
    "bco_pair": PairLoss(lambda p: preferences.bco_pair(p.chosen, p.rejected, p.beta)),
    "cpo": PairLoss(
        lambda p: preferences.sigmoid(p.margins, p.beta, p.label_smoothing) + p.nll,
        needs_reference=False,
        has_likelihood=True,
        settings=("label_smoothing",),
    ),
    "orpo": PairLoss(
        lambda p: preferences.orpo(p.chosen, p.rejected, p.beta),
        per_token=True,
        needs_reference=False,
        has_likelihood=True,
    ),
    "simpo": PairLoss(
        lambda p: preferences.simpo(p.margins, p.beta, p.gamma),
        per_token=True,
        needs_reference=False,
        settings=("gamma",),
    ),
}
