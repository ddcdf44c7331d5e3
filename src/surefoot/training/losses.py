"""The mathematics of likelihood and of preferences: pure functions, each with its source.

Shapes: P pairs, N trained positions. ``margins_P`` are log-ratios of the chosen and the rejected
response, relative to a reference if there is one, in nats; ``chosen_P`` and ``rejected_P`` are mean
log-probabilities of a response's tokens. Each loss of preferences is one number per pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..batch import IGNORE_INDEX, Batch, Loss, Outputs, trained_positions

if TYPE_CHECKING:
    import torch


# Of the metrics made here, whether greater ones are better.
LIKELIHOOD = {"nll": False, "perplexity": False, "token_accuracy": True, "divergence": False}
PAIRS = {"rewards/accuracies": True, "rewards/margins": True}


def negative_log_likelihood(outputs: Outputs, batch: Batch) -> Loss:
    """Cross entropy of the labels, summed over trained positions, in nats: ``-sum log p(label)``.
    With label smoothing (arXiv:1512.00567) it is that of smoothed labels, and ``nll`` that of the
    labels themselves. ``token_accuracy`` counts correct predictions, if these were computed."""
    assert outputs.total is not None
    metrics = _accuracy(outputs, batch)
    weight = (batch.labels[:, 1:] != IGNORE_INDEX).sum()
    logps_N = outputs.logps if outputs.plain_logps is None else outputs.plain_logps
    rows_E = None if logps_N is None else means_of_rows(-logps_N, batch)
    if outputs.smoothed is None:
        return Loss(-outputs.total, weight, metrics, rows_E)
    return Loss(-outputs.smoothed, weight, {**metrics, "nll": -outputs.total}, rows_E)


def means_of_rows(values_N: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[E] float32, of each example of ``batch`` the mean over its trained positions, without a
    gradient; NaN where it has none. Sums of segments: their order is fixed on a GPU, too."""
    import torch

    lengths_E = (batch.at or trained_positions(batch)).lengths
    # ``unsafe``: lengths are not compared with the values, for which a GPU would be waited for
    return torch.segment_reduce(values_N.detach().float(), "mean", lengths=lengths_E, unsafe=True)


def weighted_likelihood(
    outputs: Outputs, batch: Batch, *, kind: str, eaft_alpha: float, asft_alpha: float
) -> Loss:
    """Cross entropy whose tokens have weights without a gradient: ``-sum w log p(label)``.

    dft: w = p(label) (arXiv:2508.05629). eaft: w = (H / 3) ** alpha, where H is the entropy of the
    20 most probable words and 3 about its maximum, log 20 (arXiv:2601.02151). asft: that of dft,
    and alpha times KL(reference || model) at each token (arXiv:2509.23753)."""
    assert outputs.logps is not None
    logps_N = outputs.logps
    if kind == "eaft":
        assert outputs.top_entropies is not None
        weights_N = (outputs.top_entropies / 3.0) ** eaft_alpha
    else:
        weights_N = logps_N.detach().exp()
    total = -(weights_N * logps_N).sum()
    metrics = {"nll": -logps_N.detach().sum()}
    if kind == "asft":
        assert outputs.divergences is not None
        metrics["divergence"] = outputs.divergences.detach().sum()
        total = total + asft_alpha * outputs.divergences.sum()
    metrics |= _accuracy(outputs, batch)
    weight = (batch.labels[:, 1:] != IGNORE_INDEX).sum()
    return Loss(total, weight, metrics, means_of_rows(-logps_N, batch))


def _accuracy(outputs: Outputs, batch: Batch) -> dict[str, torch.Tensor]:
    """The number of correct predictions, if these were computed. Labels were looked up on the host:
    a mask of the device would be waited for."""
    if outputs.predictions is None:
        return {}
    labels_N = (batch.at or trained_positions(batch)).labels
    return {"token_accuracy": (outputs.predictions == labels_N).sum()}


def with_perplexity(_self: object, means: Mapping[str, float]) -> Mapping[str, float]:
    """The metrics of an evaluation whose loss is a likelihood, with the labels' ``perplexity``,
    even if the loss is of smoothed labels, or has that of routers in it."""
    likelihood = means.get("nll", means["loss"] - means.get("router_loss", 0.0))
    perplexity = math.exp(min(likelihood, 700.0))
    return {"loss": means["loss"], "perplexity": perplexity, **means}


def sums_of_answers(
    logps_N: torch.Tensor, answer_N: torch.Tensor, num_answers: int
) -> torch.Tensor:
    """[responses] log-probability of each response, from the response of each position, by sums of
    rows: scatter-add has no fixed order on a GPU."""
    import torch

    answers_A = torch.arange(num_answers, device=answer_N.device)
    is_its_own_AN = answer_N == answers_A[:, None]
    return torch.where(is_its_own_AN, logps_N, logps_N.new_zeros(())).sum(1)


def spread_over_answers(values_A: torch.Tensor, owner_N: torch.Tensor) -> torch.Tensor:
    """[N] the value of each position's response, by sums of columns: the gradient of an index has
    no fixed order on a GPU."""
    import torch

    answers_A = torch.arange(len(values_A), device=owner_N.device)
    is_its_own_AN = owner_N == answers_A[:, None]
    return torch.where(is_its_own_AN, values_A[:, None], values_A.new_zeros(())).sum(0)


def is_tail(answer_N: torch.Tensor, lengths_A: torch.Tensor) -> torch.Tensor:
    """[N] whether a position is beyond the length of the shorter response of its pair; ``answer_N``
    is ascending, and responses 2 i and 2 i + 1 are a pair."""
    import torch

    shorter_A = lengths_A.view(-1, 2).amin(1).repeat_interleave(2)
    starts_A = lengths_A.cumsum(0) - lengths_A
    place_N = torch.arange(len(answer_N), device=answer_N.device) - starts_A[answer_N]
    return place_N >= shorter_A[answer_N]


def cross_entropy(
    logits_EK: torch.Tensor,
    classes_E: torch.Tensor,
    weights_K: torch.Tensor,
    label_smoothing: float,
    focal_gamma: float,
) -> torch.Tensor:
    """[E] The cross entropy of the class of each example, times the weight of that class, in nats;
    of smoothed labels (arXiv:1512.00567), or a focal loss (arXiv:1708.02002, equation 5)."""
    import torch.nn.functional as F

    losses_E = F.cross_entropy(
        *(logits_EK, classes_E, weights_K), reduction="none", label_smoothing=label_smoothing
    )
    if not focal_gamma:
        return losses_E
    logps_E = F.log_softmax(logits_EK, 1).gather(1, classes_E[:, None])[:, 0]
    return losses_E * (1 - logps_E.exp()) ** focal_gamma


def binary_cross_entropy(
    logits_EK: torch.Tensor,
    truth_EK: torch.Tensor,
    weights_K: torch.Tensor,
    label_smoothing: float,
    focal_gamma: float,
) -> torch.Tensor:
    """[E] The binary cross entropy of each label, averaged over the K labels of an example, in
    nats. ``weights_K`` multiply that of labels which are true; the rest as in ``cross_entropy``."""
    import torch.nn.functional as F

    targets_EK = truth_EK.to(logits_EK) * (1 - label_smoothing) + label_smoothing / 2
    losses_EK = F.binary_cross_entropy_with_logits(
        logits_EK, targets_EK, reduction="none", pos_weight=weights_K
    )
    if focal_gamma:
        signed_EK = logits_EK.where(truth_EK, -logits_EK)
        losses_EK = losses_EK * (-signed_EK).sigmoid() ** focal_gamma
    return losses_EK.mean(1)


def sigmoid(margins_P: torch.Tensor, beta: float, label_smoothing: float) -> torch.Tensor:
    """DPO (arXiv:2305.18290): ``-log sigmoid(beta margin)``. Smoothed (cDPO,
    ericmitchell.ai/cdpo.pdf), labels are wrong with that probability."""
    import torch.nn.functional as F

    logits_P = beta * margins_P
    return (
        -(1 - label_smoothing) * F.logsigmoid(logits_P)
        - label_smoothing * F.logsigmoid(-logits_P)
    )  # fmt: skip


def robust(margins_P: torch.Tensor, beta: float, label_smoothing: float) -> torch.Tensor:
    """Robust DPO (arXiv:2403.00409): the loss of right labels, estimated without bias from labels
    that are wrong with probability ``label_smoothing``."""
    import torch.nn.functional as F

    logits_P = beta * margins_P
    right_P, wrong_P = -F.logsigmoid(logits_P), -F.logsigmoid(-logits_P)
    losses_P = (1 - label_smoothing) * right_P - label_smoothing * wrong_P
    return losses_P / (1 - 2 * label_smoothing)


def exo_pair(margins_P: torch.Tensor, beta: float, label_smoothing: float) -> torch.Tensor:
    """EXO (arXiv:2402.00856, equation 16): the reverse KL divergence from labels that are right
    with probability ``1 - label_smoothing``, which must be positive."""
    import torch.nn.functional as F

    logits_P = beta * margins_P
    better_P = F.logsigmoid(logits_P) - math.log1p(-label_smoothing)
    worse_P = F.logsigmoid(-logits_P) - math.log(label_smoothing)
    return logits_P.sigmoid() * better_P + (-logits_P).sigmoid() * worse_P


def hinge(margins_P: torch.Tensor, beta: float) -> torch.Tensor:
    """SLiC (arXiv:2305.10425) as in RSO (arXiv:2309.06657): ``max(0, 1 - beta margin)``."""
    return (1 - beta * margins_P).relu()


def ipo(margins_P: torch.Tensor, beta: float) -> torch.Tensor:
    """IPO (arXiv:2310.12036): ``(margin - 1 / (2 beta))^2``, of margins per token, as redefined."""
    return (margins_P - 1 / (2 * beta)) ** 2


def orpo(chosen_P: torch.Tensor, rejected_P: torch.Tensor, beta: float) -> torch.Tensor:
    """ORPO (arXiv:2403.07691): likelihood of the chosen response, and ``beta`` times
    ``-log sigmoid`` of the log odds ratio."""
    import torch.nn.functional as F

    log_odds_P = chosen_P - rejected_P - (_log_complement(chosen_P) - _log_complement(rejected_P))
    return -chosen_P - beta * F.logsigmoid(log_odds_P)


def simpo(margins_P: torch.Tensor, beta: float, gamma: float) -> torch.Tensor:
    """SimPO (arXiv:2405.14734): ``-log sigmoid(beta margin - gamma)``, of margins per token."""
    import torch.nn.functional as F

    return -F.logsigmoid(beta * margins_P - gamma)


def apo_zero(chosen_P: torch.Tensor, rejected_P: torch.Tensor, beta: float) -> torch.Tensor:
    """APO-zero (arXiv:2408.06266, equation 7), for chosen responses that are better than the
    model's own: ``1 - sigmoid(beta chosen) + sigmoid(beta rejected)``."""
    return (-beta * chosen_P).sigmoid() + (beta * rejected_P).sigmoid()


def apo_down(chosen_P: torch.Tensor, rejected_P: torch.Tensor, beta: float) -> torch.Tensor:
    """APO-down (arXiv:2408.06266, equation 8), for chosen responses that are worse than the model's
    own: ``sigmoid(beta chosen) + 1 - sigmoid(beta (chosen - rejected))``."""
    return (beta * chosen_P).sigmoid() + (beta * (rejected_P - chosen_P)).sigmoid()


def nca_pair(chosen_P: torch.Tensor, rejected_P: torch.Tensor, beta: float) -> torch.Tensor:
    """NCA (arXiv:2402.05369): ``-log sigmoid(r_c) - (log sigmoid(-r_c) + log sigmoid(-r_r)) / 2``
    of rewards ``r = beta log-ratio``."""
    import torch.nn.functional as F

    better_P, worse_P = beta * chosen_P, beta * rejected_P
    return -F.logsigmoid(better_P) - 0.5 * (F.logsigmoid(-better_P) + F.logsigmoid(-worse_P))


def bco_pair(chosen_P: torch.Tensor, rejected_P: torch.Tensor, beta: float) -> torch.Tensor:
    """BCO (arXiv:2404.04656) of pairs, without its reward shift: a classifier of good and bad
    responses, ``-log sigmoid(beta chosen) - log sigmoid(-beta rejected)``."""
    import torch.nn.functional as F

    return -F.logsigmoid(beta * chosen_P) - F.logsigmoid(-beta * rejected_P)


def sppo_hard(chosen_P: torch.Tensor, rejected_P: torch.Tensor, beta: float) -> torch.Tensor:
    """SPPO (arXiv:2405.00675, equation 4.7) with probability 1 of the chosen response:
    ``(chosen - 1 / (2 beta))^2 + (rejected + 1 / (2 beta))^2``."""
    return (chosen_P - 0.5 / beta) ** 2 + (rejected_P + 0.5 / beta) ** 2


def _log_complement(logps_P: torch.Tensor) -> torch.Tensor:
    """``log(1 - p)``."""
    return (-logps_P.expm1()).log()


def kto(
    log_ratios_E: torch.Tensor, is_desirable_E: torch.Tensor, z_E: torch.Tensor, beta: float
) -> torch.Tensor:
    """KTO (arXiv:2402.01306): ``1 - sigmoid(beta (r - z))`` of a desirable answer, ``1 -
    sigmoid(beta (z - r))`` of another one. E examples; r is the log ratio of policy and reference,
    z that of mismatched pairs of prompt and answer."""
    margins_E = beta * (log_ratios_E - z_E)
    return 1 - margins_E.where(is_desirable_E.bool(), -margins_E).sigmoid()


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


def _smoothed(pairs: Pairs) -> torch.Tensor:
    return sigmoid(pairs.margins, pairs.beta, pairs.label_smoothing)


_SMOOTHS = ("label_smoothing",)
LOSSES: Mapping[str, PairLoss] = {
    "sigmoid": PairLoss(_smoothed, settings=_SMOOTHS),
    "sigmoid_norm": PairLoss(_smoothed, per_token=True, settings=_SMOOTHS),
    "robust": PairLoss(lambda p: robust(p.margins, p.beta, p.label_smoothing), settings=_SMOOTHS),
    "exo_pair": PairLoss(
        lambda p: exo_pair(p.margins, p.beta, p.label_smoothing), settings=_SMOOTHS
    ),
    "hinge": PairLoss(lambda p: hinge(p.margins, p.beta)),
    "ipo": PairLoss(lambda p: ipo(p.margins, p.beta), per_token=True),
    "apo_zero": PairLoss(lambda p: apo_zero(p.chosen, p.rejected, p.beta)),
    "apo_down": PairLoss(lambda p: apo_down(p.chosen, p.rejected, p.beta)),
    "nca_pair": PairLoss(lambda p: nca_pair(p.chosen, p.rejected, p.beta)),
    "sppo_hard": PairLoss(lambda p: sppo_hard(p.chosen, p.rejected, p.beta)),
    "bco_pair": PairLoss(lambda p: bco_pair(p.chosen, p.rejected, p.beta)),
    "cpo": PairLoss(
        lambda p: _smoothed(p) + p.nll,
        needs_reference=False,
        has_likelihood=True,
        settings=_SMOOTHS,
    ),
    "orpo": PairLoss(
        lambda p: orpo(p.chosen, p.rejected, p.beta),
        per_token=True,
        needs_reference=False,
        has_likelihood=True,
    ),
    "simpo": PairLoss(
        lambda p: simpo(p.margins, p.beta, p.gamma),
        per_token=True,
        needs_reference=False,
        settings=("gamma",),
    ),
}
