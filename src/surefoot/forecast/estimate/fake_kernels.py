"""Results of kernels for which torch's fake tensors know fewer cases than its real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def run(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> object:
    """The result of ``func``; of a kernel that fails on fake tensors, one of the right shape."""
    if func is torch.ops.aten._grouped_mm.default and isinstance(args[0], FakeTensor):
        return grouped_mm(*args, **(kwargs or {}))
    return func(*args, **(kwargs or {}))


def grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    _bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A matrix product for each expert, of E. Fake tensors know bfloat16 and widths of 16 bytes;
    a CPU computes all. The dimension that ``offs`` divides among the experts is T.

    [T, K] x [E, K, N] = [T, N]; [M, T] x [T, N] = [E, M, N]; [E, M, K] x [K, T] = [M, T].
    """
    shape = [left.shape[-2], right.shape[-1]]
    if left.ndim == right.ndim:
        assert offs is not None or left.ndim == 3
        shape.insert(0, left.shape[0] if offs is None else offs.shape[0])
    return left.new_empty(shape, dtype=out_dtype)
