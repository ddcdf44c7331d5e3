"""Cross entropy of one chunk of logits: each label's log-probability, and the gradient of their sum
with respect to the logits.

Shapes: C positions, V vocabulary.
"""

from __future__ import annotations

import torch

# Log-probability of each label [C], the sum of the log-probabilities of all words [C], and, of
# minus the sum of the smoothed labels' log-probabilities, the gradient with respect to the logits
# [C, V].
ChunkGradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def capped(logits_CV: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """The capped logits, in float32 or wider: tanh(x / cap) * cap."""
    logits_CV = logits_CV.to(wide(logits_CV.dtype))
    return logits_CV if softcap is None else torch.tanh(logits_CV / softcap) * softcap


def uncapped(
    slopes_CV: torch.Tensor, logits_CV: torch.Tensor, softcap: float | None
) -> torch.Tensor:
    """Gradients before the cap from those after: d(cap tanh(x / cap))/dx = 1 - tanh^2(x / cap)."""
    return slopes_CV if softcap is None else slopes_CV * (1 - (logits_CV / softcap).square())


def torch_logit_gradients(
    logits_CV: torch.Tensor,
    labels_C: torch.Tensor,
    softcap: float | None,
    smoothing: float,
    learns: bool,
) -> ChunkGradients:
    """``learns``: whether the gradient is wanted. The logits may be overwritten."""
    logits_CV = capped(logits_CV, softcap)
    # Where nobody looks at the logits again, their place will do; seen to be right on CPUs.
    room_CV = logits_CV if softcap is None and logits_CV.is_cpu else None
    logps_CV = torch.log_softmax(logits_CV, -1, out=room_CV)
    logps_C = logps_CV.gather(1, labels_C[:, None])[:, 0]
    sums_C = logps_CV.sum(-1) if smoothing else torch.zeros_like(logps_C)
    if not learns:
        return logps_C, sums_C, None
    slopes_CV = logps_CV.exp_()
    slopes_CV = slopes_CV.sub_(smoothing / logits_CV.shape[1]) if smoothing else slopes_CV
    shares_C1 = torch.full_like(logps_C[:, None], smoothing - 1.0)
    slopes_CV.scatter_add_(1, labels_C[:, None], shares_C1)
    return logps_C, sums_C, uncapped(slopes_CV, logits_CV, softcap)
