"""The mathematics of likelihood: pure functions, each with its source."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...batch import IGNORE_INDEX, Batch, Loss, Outputs


def negative_log_likelihood(outputs: Outputs, batch: Batch) -> Loss:
    """Cross entropy of the labels, summed over trained positions, in nats: ``-sum log p(label)``.
    With label smoothing (arXiv:1512.00567) it is that of smoothed labels, and ``nll`` that of the
    labels themselves. ``token_accuracy`` counts correct predictions, if these were computed."""
    assert outputs.total is not None
    is_trained = batch.labels[:, 1:] != IGNORE_INDEX
    metrics = {}
    if outputs.predictions is not None:
        labels = batch.labels[:, 1:][is_trained]
        metrics["token_accuracy"] = (outputs.predictions == labels).sum()
    weight = is_trained.sum()
    if outputs.smoothed is None:
        return Loss(-outputs.total, weight, metrics)
    return Loss(-outputs.smoothed, weight, {**metrics, "nll": -outputs.total})


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
    is_trained = batch.labels[:, 1:] != IGNORE_INDEX
    if outputs.predictions is not None:
        metrics["token_accuracy"] = (outputs.predictions == batch.labels[:, 1:][is_trained]).sum()
    return Loss(total, is_trained.sum(), metrics)


def with_perplexity(_self: object, means: Mapping[str, float]) -> Mapping[str, float]:
    """The metrics of an evaluation whose loss is a likelihood, with the labels' ``perplexity``,
    even if the loss is of smoothed labels, or has that of routers in it."""
    likelihood = means.get("nll", means["loss"] - means.get("router_loss", 0.0))
    perplexity = math.exp(min(likelihood, 700.0))
    return {"loss": means["loss"], "perplexity": perplexity, **means}
