"""Cross entropy of one chunk of logits: the log-probability of each label and the gradient of their
sum with respect to the logits.

In torch alone this needs half a dozen passes over the logits, in float32. On a GPU, by the bytes
that are moved, that costs about as much as the products with a small model's matrix. One Triton
kernel needs two passes and overwrites the logits with their gradients.

Shapes: C positions, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

logger = logging.getLogger(__name__)

# Log-probability of each label [C], the sum of the log-probabilities of all words [C], and, of
# minus the sum of the smoothed labels' log-probabilities, the slopes by the logits as they came
# [C, V]. The logits may be overwritten. Settings: softcap, smoothing, whether slopes are wanted.
Learnt = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
Slopes = Callable[[torch.Tensor, torch.Tensor, float | None, float, bool], Learnt]


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
    """Gradients before the cap from those after it: d(cap tanh(x / cap))/dx = 1 - tanh^2(x /
    cap).
    """
    return slopes_CV if softcap is None else slopes_CV * (1 - (logits_CV / softcap).square())


def torch_logit_gradients(
    logits_CV: torch.Tensor,
    labels_C: torch.Tensor,
    softcap: float | None,
    smoothing: float,
    learns: bool,
) -> Learnt:
    """With torch's own operations, on any device."""
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


def fastest(logits_CV: torch.Tensor) -> Slopes:
    """The fused kernel for logits like these, if it is available and passes its self-check, else
    torch.
    """
    is_narrow = logits_CV.dtype != torch.float64
    return (
        _fused(logits_CV.device.type) or torch_logit_gradients
        if is_narrow
        else torch_logit_gradients
    )


@cache
def _fused(device: str) -> Slopes | None:
    """The kernel, once it has given the same values as torch on this device, bitwise the same
    every time.
    """
    if device != "cuda" or not find_spec("triton"):
        return None
    fused: Slopes = import_module(".slopes_kernel", __package__).fused  # Triton is for GPUs alone
    try:
        why = why_not(fused, torch.device(device))
    except Exception as error:  # a compiler may fail in any way, and torch will do
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
    if why is not None:
        logger.info("logit gradients: torch, the fused kernel is rejected: %s", why)
        return None
    logger.debug("logit gradients: fused kernel")
    return fused


def why_not(fused: Slopes, device: torch.device) -> str | None:
    """Why ``fused`` fails its self-check on ``device``, on random logits; None if it passes."""
    dice = torch.Generator(device).manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        logits_CV = torch.randn(3, 5_003, generator=dice, device=device).mul_(4).to(dtype)
        labels_C = torch.tensor([0, 5_002, 17], device=device)
        for softcap, smoothing in ((None, 0.0), (None, 0.1), (3.0, 0.1)):
            settings = labels_C, softcap, smoothing, True
            expected = torch_logit_gradients(logits_CV.clone(), *settings)
            first, second = (fused(logits_CV.clone(), *settings) for _ in range(2))
            for name, here, again, there in zip(_NAMES, first, second, expected, strict=True):
                if here is None or again is None or there is None:
                    return f"it returns no {name}"
                if name == "sums" and not smoothing:
                    continue  # nobody reads them
                if not torch.equal(here, again):
                    return f"its {name} differ from run to run"
                error = float((here.double() - there.double()).abs().max())
                bound = 16 * torch.finfo(here.dtype).eps * float(there.abs().max())
                if not error <= bound:
                    return f"its {name} differ by {error:.2g} from torch's"
    return None


_NAMES = ("log-probabilities", "sums", "slopes")
