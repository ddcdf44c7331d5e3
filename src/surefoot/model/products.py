"""oneDNN's products of float32 matrices on a CPU, instead of torch's own (MKL's), for training.

On AMD's processors with AVX-512, MKL uses half of the units. torch has no setting that sends
products of full float32 precision to oneDNN (docs/decisions/0086), so they are registered through
``torch.library`` as the CPU's kernels of ``aten::mm``, ``addmm`` and ``addmm_``. Autograd,
adapters, the output head and optimizers all come down to these three.
"""

from __future__ import annotations

import platform
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import DispatchKeySet, Tensor

# Below these MKL's products take no longer, even with half of the units: a call of oneDNN takes
# 25 us more, small sizes leave units idle, and a transposed matrix is copied first.
_LEAST_WORK = 2**23  # multiplications
_LEAST_SIZE, _LEAST_COLUMNS_FOR_COPY = 32, 128
_ROWS = 1024  # that are added to a matrix at once


def choose(processor: str, vector_units: str) -> Literal["oneDNN", "torch"]:
    """Whose products are faster on a processor that the system describes by ``processor``, and of
    which torch uses ``vector_units``."""
    return "oneDNN" if "AuthenticAMD" in processor and vector_units == "AVX512" else "torch"


def chosen() -> Literal["oneDNN", "torch"]:
    """Whose products a run has on this machine."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    has_onednn &= hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if torch.cuda.is_available() or not has_onednn:
        return "torch"
    return choose(_processor(), torch.backends.cpu.get_cpu_capability())


def use_chosen() -> None:
    """Give this process those products, from now on."""
    if chosen() == "oneDNN":
        register()


def _processor() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return platform.processor()


@cache
def register() -> torch.library.Library:
    """Register oneDNN's products, whatever the processor is. They end with the library."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():  # torch warns of a kernel that replaces another
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for name, kernel in (("mm", _mm), ("addmm", _addmm), ("addmm_", _addmm_)):
            library.impl(  # type: ignore[no-untyped-call]
                name, kernel, "CPU", with_keyset=True
            )
    return library


def _original(name: str) -> Callable[..., Tensor]:
    call: Callable[..., Tensor] = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed
    return call


_original_mm, _original_addmm, _original_addmm_ = map(_original, ("mm", "addmm", "addmm_"))


def _mm(keys: DispatchKeySet, a_MK: Tensor, b_KN: Tensor) -> Tensor:
    if not _fits(a_MK, b_KN):
        return _original_mm(keys, a_MK, b_KN)
    return _product(a_MK, b_KN)


def _addmm(
    keys: DispatchKeySet,
    added: Tensor,
    a_MK: Tensor,
    b_KN: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    if not (_fits(a_MK, b_KN) and added.dtype == torch.float32):
        return _original_addmm(keys, added, a_MK, b_KN, beta=beta, alpha=alpha)
    if beta == alpha == 1 and added.shape == b_KN.shape[1:] and added.is_contiguous():
        return _product(a_MK, b_KN, added)
    y_MN = _product(a_MK, b_KN).mul_(alpha)
    return y_MN.add_(added, alpha=beta) if beta else y_MN


def _addmm_(
    keys: DispatchKeySet,
    y_MN: Tensor,
    a_MK: Tensor,
    b_KN: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    is_right = y_MN.shape == (*a_MK.shape[:1], *b_KN.shape[1:]) and y_MN.dtype == torch.float32
    if not (_fits(a_MK, b_KN) and is_right):
        return _original_addmm_(keys, y_MN, a_MK, b_KN, beta=beta, alpha=alpha)
    # in parts that stay in the cache: the gradient of an output head has the size of the head
    for y_PN, a_PK in zip(torch.split(y_MN, _ROWS), torch.split(a_MK, _ROWS), strict=True):
        product_PN = _product(a_PK, b_KN)
        if beta == 0:  # what is there before may be NaN
            torch.mul(product_PN, alpha, out=y_PN)
        else:
            (y_PN if beta == 1 else y_PN.mul_(beta)).add_(product_PN, alpha=alpha)
    return y_MN


def _fits(a_MK: Tensor, b_KN: Tensor) -> bool:
    """Whether oneDNN multiplies these, and faster."""
    # most products of a small model end here
    if a_MK.numel() * b_KN.shape[-1] < _LEAST_WORK or a_MK.dim() != 2 or b_KN.dim() != 2:
        return False
    if not a_MK.dtype == b_KN.dtype == torch.float32 or a_MK.shape[1] != b_KN.shape[0]:
        return False
    if min(*a_MK.shape, b_KN.shape[1]) < _LEAST_SIZE:
        return False
    # oneDNN has only its reference implementation, which is a thousand times slower, for slices
    if not (b_KN.is_contiguous() or b_KN.t().is_contiguous()):
        return False
    return b_KN.shape[1] >= _LEAST_COLUMNS_FOR_COPY or a_MK.is_contiguous()


def _product(a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    y_MN: Tensor = torch.ops.mkldnn._linear_pointwise(a_MK, b_KN.t(), bias_N, "none", [], "")
    return y_MN
