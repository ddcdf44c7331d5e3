"""The mathematics of the stages: pure functions of tensors, each with its source.

N trained positions of a batch.
"""

from __future__ import annotations

import torch

from ..batch import Loss


def negative_log_likelihood(logps_N: torch.Tensor) -> Loss:
    """Cross entropy of the labels, summed over trained positions, in nats: ``-sum log
    p(label)``."""
    return Loss(-logps_N.sum(), torch.tensor(logps_N.numel(), device=logps_N.device))
