"""Randomness as a function of (seed, step, micro-batch, rank), re-derived before every micro-batch.

So dropout at a step does not depend on what ran before it: a resumed run draws the same numbers. The
generators are saved as well, for callbacks and methods that draw between steps.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping

import numpy as np
import torch
import xxhash


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
    """Only kernels that give the same bits every time; those without one warn instead of failing."""
    if wanted and torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its start
    torch.use_deterministic_algorithms(wanted, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = (
        False  # a debugging aid that costs a write
    )


class RandomState:
    """The random generators of this process, as one state."""

    def state_dict(self) -> dict[str, object]:
        """Python's, numpy's and torch's generators; torch's of every device in use."""
        version, words, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state()
        state: dict[str, object] = {
            "python": [version, list(words), gauss],
            "numpy": [
                str(kind),
                torch.from_numpy(keys.astype(np.int64)),
                position,
                has_gauss,
                cached,
            ],
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Set the generators; a device that is not here is left out."""
        version, words, gauss = state["python"]  # type: ignore[misc]
        random.setstate((version, tuple(words), gauss))
        kind, keys, position, has_gauss, cached = state["numpy"]  # type: ignore[misc]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
        torch.set_rng_state(state["torch"])  # type: ignore[arg-type]
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])  # type: ignore[arg-type]
