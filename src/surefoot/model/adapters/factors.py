"""Low-rank factors of a weight, from which LoRA may start instead of from random numbers.

Shapes: O and I the sizes of output and input, R rank. All is computed in float32 by rules that
depend on the weight and a seed alone, so any rank may compute the factors of any weight.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import torch

Computed = Literal["pissa", "olora"]
_OVERSAMPLING = 8  # more directions than wanted, so that the last ones are exact, too


@dataclass(frozen=True)
class Factors:
    """``scale * b @ a`` is the part of a weight that they stand for."""

    a: torch.Tensor  # [R, I]
    b: torch.Tensor  # [O, R]

    def to(self, dtype: torch.dtype) -> Factors:
        """The same on the CPU, in another type."""
        return Factors(*(t.to("cpu", dtype).contiguous() for t in (self.a, self.b)))


def factors_of(
    kind: Computed, weight_OI: torch.Tensor, rank: int, scale: float, *, iterations: int, seed: int
) -> Factors:
    """The factors of ``weight_OI`` by the rule ``kind``."""
    exact = torch.float64 if weight_OI.dtype == torch.float64 else torch.float32
    weight_OI = torch.empty(weight_OI.shape, dtype=exact, device=weight_OI.device).copy_(weight_OI)
    if kind == "olora":
        return orthonormal(weight_OI, rank)
    return principal(weight_OI, rank, scale, iterations=iterations, seed=seed)


def principal(
    weight_OI: torch.Tensor, rank: int, scale: float, *, iterations: int, seed: int
) -> Factors:
    """PiSSA (arXiv:2404.02948): the largest singular values with their vectors, the root of each
    value in both factors. ``iterations`` of the randomized method (arXiv:0909.4061); 0: exact."""
    if iterations:
        u_OR, s_R, v_IR = _largest(weight_OI, rank, iterations, seed)
    else:
        u_OK, s_K, v_KI = torch.linalg.svd(weight_OI, full_matrices=False)
        u_OR, s_R, v_IR = u_OK[:, :rank], s_K[:rank], v_KI[:rank].T
    root_R = (s_R / scale).sqrt()
    return Factors(root_R[:, None] * v_IR.T, u_OR * root_R)


def orthonormal(weight_OI: torch.Tensor, rank: int) -> Factors:
    """OLoRA (arXiv:2406.01775): the first columns and rows of the QR decomposition."""
    q_OK, r_KI = torch.linalg.qr(weight_OI)
    return Factors(r_KI[:rank], q_OK[:, :rank])


def seed_of(seed: int, name: str) -> int:
    """A seed for the weight ``name``, whatever the others are."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def _largest(
    weight_OI: torch.Tensor, rank: int, iterations: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ``rank`` largest singular values with their vectors, by iterations in a subspace."""
    size = min(rank + _OVERSAMPLING, *weight_OI.shape)
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same numbers everywhere
    start_IS = torch.randn(weight_OI.shape[1], size, generator=generator).to(weight_OI)
    q_OS = torch.linalg.qr(weight_OI @ start_IS).Q
    for _ in range(iterations):
        q_IS = torch.linalg.qr(weight_OI.T @ q_OS).Q
        q_OS = torch.linalg.qr(weight_OI @ q_IS).Q
    u_SS, s_S, v_SI = torch.linalg.svd(q_OS.T @ weight_OI, full_matrices=False)
    return (q_OS @ u_SS)[:, :rank], s_S[:rank], v_SI[:rank].T
