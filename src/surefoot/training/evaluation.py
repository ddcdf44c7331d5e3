"""Loss, perplexity and token accuracy on held-out examples, without touching anything the training
uses. Of several processes each evaluates its share; what they have found is added up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ..batch import IGNORE_INDEX, Batch, LossFunction, Outputs


@torch.no_grad()
def evaluate(
    batches: Iterable[Batch],
    forward: Callable[[Batch], Outputs],
    loss_function: LossFunction,
    *,
    device: torch.device,
    after: Callable[[], None],
    sums: Callable[[Sequence[float]], list[float]] = list,
    is_likelihood: bool = True,
) -> dict[str, float]:
    """Metrics over ``batches``: ``loss`` (nats per unit of weight) and those that come with it; if
    that is likelihood, ``perplexity`` (of the labels, even if the loss is of smoothed ones) and
    ``token_accuracy``.

    ``after`` is called after every batch and may raise to break off. ``sums`` adds up over the
    processes that have other batches: equally many, if a process's forward pass needs the others.
    """
    total, weight, correct, trained = 0.0, 0.0, 0.0, 0.0
    extra: dict[str, float] = {}
    for cpu_batch in batches:
        batch = cpu_batch.to(device)
        outputs = forward(batch)
        loss = loss_function(outputs, batch)
        total, weight = total + float(loss.total), weight + float(loss.weight)
        for name, value in loss.metrics.items():
            extra[name] = extra.get(name, 0.0) + float(value)
        if is_likelihood and outputs.predictions is not None:
            labels = batch.labels[:, 1:][batch.labels[:, 1:] != IGNORE_INDEX]
            correct += float((outputs.predictions == labels).sum())
            trained += len(labels)
        after()
    total, weight, correct, trained, *values = sums(
        [total, weight, correct, trained, *extra.values()]
    )
    mean = total / weight if weight else float("nan")
    more = {name: value / weight for name, value in zip(extra, values, strict=True)}
    metrics = {"loss": mean}
    if is_likelihood:
        metrics["perplexity"] = math.exp(min(more.get("nll", mean), 700.0))
    if trained:
        metrics["token_accuracy"] = correct / trained
    return metrics | more


def prefixed(parts: Mapping[str, Mapping[str, float]], prefix: str) -> dict[str, float]:
    """``{"": m}`` as ``eval_loss``; several datasets as ``eval_NAME_loss`` and their mean as
    ``eval_loss``."""
    if list(parts) == [""]:
        return {f"{prefix}_{name}": value for name, value in parts[""].items()}
    named = {f"{prefix}_{part}_{name}": v for part, m in parts.items() for name, v in m.items()}
    common = set.intersection(*(set(metrics) for metrics in parts.values()))
    means = {
        f"{prefix}_{name}": sum(m[name] for m in parts.values()) / len(parts)
        for name in sorted(common)
    }
    return named | means
