"""What decides the bits of a run: seeds, deterministic kernels, the precision of products.

Randomness is a function of (seed, step, micro-batch, rank), derived again before every micro-batch.
So dropout at a step does not depend on what ran before it: a resumed run draws the same numbers.
The generators are saved as well (``RandomState``), for callbacks and methods that draw between
steps. The precision of forward and backward is fp32, or autocast to bf16 or fp16 with a loss
scaler.

Deterministic kernels: a run with ``train.deterministic`` has torch only warn of operations without
a deterministic algorithm, because some architectures contain one. But while torch only warns, its
flash and memory-efficient attention add the gradients of the queries in any order, and cuDNN's
attention, which has no such algorithm, may be selected. Both obey strict mode (torch 2.11,
``sdp_utils.cpp`` and ``attention_backward.cu``). So strict mode is on while an attention kernel is
selected and computes, forward and backward, and off everywhere else. Padded rows go through
transformers' own attention function, which stays as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
import xxhash
from torch.utils import deterministic

from ..errors import counted
from ..log import fell_back
from ..storage.cgroups import usable_cores

logger = logging.getLogger(__name__)


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
    # It only warns: some architectures contain an operation that has no deterministic kernel
    # (docs/decisions/0041).
    torch.use_deterministic_algorithms(wanted, warn_only=True)
    # a debugging aid that costs a write of every new tensor
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


STRICT_DEVICES = {"cuda"}  # attention of CPUs adds in a fixed order


def deterministically(
    attend: Callable[[Sequence[torch.Tensor]], torch.Tensor], heads: Sequence[torch.Tensor]
) -> torch.Tensor:
    """``attend(heads)``, forward and backward in strict mode if the run asks for deterministic
    kernels. Inside a compiled layer nothing changes: the mode is read when its graph is run."""
    is_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    applies = is_warning and torch.are_deterministic_algorithms_enabled()
    if torch.compiler.is_compiling() or not applies or heads[0].device.type not in STRICT_DEVICES:
        return attend(heads)
    heads = cast("Sequence[torch.Tensor]", _BackwardLeaves.apply(*heads))  # type: ignore[no-untyped-call]
    torch.use_deterministic_algorithms(True)
    try:
        output = attend(heads)
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)
    return cast("torch.Tensor", _BackwardEnters.apply(output))  # type: ignore[no-untyped-call]


def leave_strict_mode() -> None:
    """After a backward pass that failed inside of attention, which would have left it."""
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True, warn_only=True)


class _BackwardEnters(torch.autograd.Function):
    """The output of attention; its backward pass is the first one, and enters strict mode."""

    @staticmethod
    def forward(_ctx: Any, output: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        torch.use_deterministic_algorithms(True)
        return gradients[0]


class _BackwardLeaves(torch.autograd.Function):
    """The inputs of attention; their backward pass is the last one, and leaves strict mode."""

    @staticmethod
    def forward(_ctx: Any, *heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in heads)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.use_deterministic_algorithms(True, warn_only=True)
        return gradients


PrecisionName = Literal["fp32", "bf16", "fp16"]


def choose(name: Literal["auto"] | PrecisionName) -> PrecisionName:
    """The precision in which this machine computes what a recipe sets.

    ``auto`` is bf16 on a GPU that supports it, otherwise fp32: a run has the same numbers on every
    CPU. Products of bf16 reach 1.2 to 3 times fp32's speed on an AMD EPYC with AVX-512 BF16, and a
    sixth to a half of it on the same CPU without these instructions
    (``ONEDNN_MAX_CPU_ISA=AVX512_CORE``). fp16 on a CPU is fp32 (``replaced`` says so), whatever its
    instructions, since they would decide the numbers: it is no more exact, and was up to three
    times as slow.
    """
    if name == "auto":
        return "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "fp32"
    return "fp32" if replaced(name) else name


def replaced(name: Literal["auto"] | PrecisionName) -> str | None:
    """Why this machine computes in another precision than ``name``; None if it does not."""
    if name != "fp16" or torch.cuda.is_available():
        return None
    return "fp32 is faster and more exact there"


def autocast(name: PrecisionName, device: torch.device) -> AbstractContextManager[object]:
    """The context in which to run a forward pass."""
    if name == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if name == "bf16" else torch.float16)


@dataclass
class LossScaler:
    """Dynamic loss scaling (arXiv:1710.03740): halve on overflow, double after calm steps.

    The scale is a power of two, so scaling and unscaling are exact. Switched off it stays at 1.
    """

    enabled: bool
    scale: float = 1.0
    calm_steps: int = 0
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        if self.enabled and self.scale == 1.0:
            self.scale = 2.0**16

    def update(self, *, overflowed: bool) -> None:
        """Update the scale after one step."""
        if not self.enabled:
            return
        if overflowed:
            self.scale, self.calm_steps = max(1.0, self.scale / 2), 0
            return
        self.calm_steps += 1
        if self.calm_steps == self.growth_interval:
            self.scale, self.calm_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, float]:
        """Scale and number of calm steps."""
        return {"scale": self.scale, "calm_steps": self.calm_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue with a saved scale.

        A run without scaling leaves a scale of 1 with no calm step. With it gradients of fp16 would
        vanish until thousands of steps have doubled it, so scaling then begins as in a new run.
        """
        if self.enabled and (state["scale"], state["calm_steps"]) != (1.0, 0):
            self.scale, self.calm_steps = float(state["scale"]), int(state["calm_steps"])


def limit_threads() -> None:
    """Compute in no more threads than the cores that this process may use (``usable_cores``): torch
    knows to which it is bound, but not what a container gives it. ``OMP_NUM_THREADS`` of the
    environment has precedence."""
    cores = usable_cores()
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > cores:
        threads = counted(cores, "thread")
        logger.info("computing in %s: a cgroup gives this process no more cores", threads)
        torch.set_num_threads(cores)


# glibc's mallopt: blocks above this are mapped one by one; a free end above this is given back.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_NEVER = 2**31 - 1  # bytes, the largest int


def keep_freed_memory() -> None:
    """Let this process keep the memory that a step frees for the next step, if its C library is
    glibc.

    The C library returns large blocks to the system at once, and requests new ones, page by page.
    For a step on a CPU these were 300,000 pages and a tenth of the time (Qwen2, hidden size 512,
    vocabulary 32,000). The next step needs the same memory, so returning it gains nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library, or Windows
        return
    if not (mallopt(_MMAP_THRESHOLD, _NEVER) and mallopt(_TRIM_THRESHOLD, _NEVER)):
        what = "freed memory is returned to the system after each step"
        fell_back(what, "mallopt failed", "takes up to a tenth of the time", logging.INFO)


def return_freed_memory() -> None:
    """Return freed memory to the device and to the system, after an allocation that failed."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
