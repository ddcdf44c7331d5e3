"""Randomness as a function of (seed, step, micro-batch, rank), re-derived before every micro-batch.

So dropout at a step does not depend on what ran before it: a resumed run draws the same numbers.
The generators are saved as well, for callbacks and methods that draw between steps.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

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
    """Only kernels that give the same bits every time; those without one warn instead of
    failing."""
    if wanted and torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its start
    torch.use_deterministic_algorithms(wanted, warn_only=True)
    # a debugging aid that costs a write of every new tensor
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class RandomState:
    """The random generators of this process, as one state."""

    def state_dict(self) -> dict[str, Any]:
        """Python's, numpy's and torch's generators, and that of the GPU in use."""
        version, words, gauss = random.getstate()
        numpy: dict[str, Any] = np.random.get_state(legacy=False)
        state: dict[str, Any] = {
            "python": [version, list(words), gauss],
            "numpy": {**numpy, "state": _words_to_tensor(numpy["state"])},
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the generators; one of a device that is not here is left out."""
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        numpy = state["numpy"]
        np.random.set_state({**numpy, "state": _tensor_to_words(numpy["state"])})
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


def _words_to_tensor(state: Mapping[str, Any]) -> dict[str, Any]:
    """The Mersenne twister's 624 words as a tensor: files know no numpy arrays."""
    return {"key": torch.from_numpy(state["key"].astype(np.int64)), "pos": int(state["pos"])}


def _tensor_to_words(state: Mapping[str, Any]) -> dict[str, Any]:
    return {"key": state["key"].numpy().astype(np.uint32), "pos": state["pos"]}
