"""The mathematics of the stages: pure functions, each with its source."""

from __future__ import annotations

from ...batch import IGNORE_INDEX, Batch, Loss, Outputs


def negative_log_likelihood(outputs: Outputs, batch: Batch) -> Loss:
    """Cross entropy of the labels, summed over trained positions, in nats: ``-sum log p(label)``.

    Of smoothed labels (arXiv:1512.00567), if they are; then ``nll`` says that of the labels
    themselves.
    """
    assert outputs.total is not None
    weight = (batch.labels[:, 1:] != IGNORE_INDEX).sum()
    if outputs.smoothed is None:
        return Loss(-outputs.total, weight)
    return Loss(-outputs.smoothed, weight, {"nll": -outputs.total})


def check_smoothing(factor: float) -> None:
    """Raise ``ValueError`` unless ``factor`` leaves something of a label."""
    if not 0 <= factor < 1:
        raise ValueError(f"label_smoothing_factor must be in [0, 1), got {factor}")
