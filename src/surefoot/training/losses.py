"""The mathematics of the stages: pure functions, each with its source."""

from __future__ import annotations

from ..batch import IGNORE_INDEX, Batch, Loss, Outputs


def negative_log_likelihood(outputs: Outputs, batch: Batch) -> Loss:
    """Cross entropy of the labels, summed over trained positions, in nats: ``-sum log
    p(label)``."""
    assert outputs.total is not None
    return Loss(-outputs.total, (batch.labels[:, 1:] != IGNORE_INDEX).sum())
