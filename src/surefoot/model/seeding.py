"""Randomness as a function of (seed, step, micro-batch, rank), derived again before every
micro-batch.

So dropout at a step does not depend on what ran before it: a resumed run draws the same numbers.
The generators are saved as well (``RandomState``), for callbacks and methods that draw between
steps.
"""

from __future__ import annotations

import os
import random

import numpy as np
import torch
import xxhash
from torch.utils import deterministic


def derive(*parts: int) -> int:
    """A 63-bit seed from integers; close inputs give unrelated seeds."""
    return xxhash.xxh3_64_intdigest(",".join(map(str, parts)).encode()) >> 1


def seed_everything(*parts: int) -> None:
    """Seed torch (all devices), numpy and Python from integers."""
    seed = derive(*parts)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def use_deterministic_kernels(wanted: bool) -> None:
    """Use only kernels that give the same bits every time; an operation without one warns."""
    if wanted and torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its start
    torch.use_deterministic_algorithms(wanted, warn_only=True)
    # a debugging aid that costs a write of every new tensor
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
