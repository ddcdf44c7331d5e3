"""Softmax, log-probability and logit gradients of a chunk in one Triton kernel
(``logit_gradients``).

Each program computes one position. It reads the row once for the largest logit and the sum of
exponentials, which is corrected as the largest grows (Milakov and Gimelshein, arXiv:1805.02867),
and once more to overwrite the logits with their gradients.
"""

import torch
import triton
import triton.language as tl

BLOCK = tl.constexpr(4_096)  # logits at once


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit  # type: ignore[untyped-decorator]
def _row(  # type: ignore[no-untyped-def]
    logits,
    labels,
    found,
    columns,
    SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    LEARNS: tl.constexpr,
):
    position, positions = tl.program_id(0), tl.num_programs(0)
    row = logits + position.to(tl.int64) * columns
    label = tl.load(labels + position)
    highest, mass, total = -float("inf"), 0.0, 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < columns, other=0.0).to(tl.float32)
        if SOFTCAP is not None:
            x = SOFTCAP * _tanh(x / SOFTCAP)
        total += tl.sum(tl.where(at < columns, x, 0.0), 0)
        x = tl.where(at < columns, x, -float("inf"))
        higher = tl.maximum(highest, tl.max(x, 0))
        mass = mass * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), 0)
        highest = higher
    level = highest + tl.log(mass)
    of_label = tl.load(row + label).to(tl.float32)
    if SOFTCAP is not None:
        of_label = SOFTCAP * _tanh(of_label / SOFTCAP)
    tl.store(found + position, of_label - level)
    tl.store(found + positions + position, total - level * columns)
    if LEARNS:
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(row + at, mask=at < columns, other=0.0).to(tl.float32)
            bent = 1.0
            if SOFTCAP is not None:
                tanh = _tanh(x / SOFTCAP)
                x, bent = SOFTCAP * tanh, 1 - tanh * tanh
            slope = tl.exp(x - level) - SMOOTHING / columns
            slope += tl.where(at == label, SMOOTHING - 1.0, 0.0)
            tl.store(row + at, (slope * bent).to(logits.dtype.element_ty), mask=at < columns)


def fused(
    logits_CV: torch.Tensor,
    labels_C: torch.Tensor,
    softcap: float | None,
    smoothing: float,
    learns: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """As ``torch_logit_gradients``; the gradients overwrite the logits, in their dtype."""
    logits_CV = logits_CV.contiguous()
    positions, columns = logits_CV.shape
    found_2C = torch.empty(2, positions, dtype=torch.float32, device=logits_CV.device)
    settings = {"SOFTCAP": softcap, "SMOOTHING": smoothing, "LEARNS": learns}
    _row[(positions,)](logits_CV, labels_C, found_2C, columns, **settings, num_warps=8)
    return found_2C[0], found_2C[1], logits_CV if learns else None
