"""A quantized base on fake tensors: its memory and its products as with bitsandbytes.

Modules stay where they are; their weights become bytes, and each product temporarily creates the
full matrix, forward and backward. bitsandbytes itself is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ...model.section import ModelSection

BLOCK = 64  # weights with a scale of their own, of 4 bits
OUTER_BLOCK = 256  # scales with a scale of their own, if they are quantized, too
FLOAT32 = 4  # bytes
CODES = 16 * FLOAT32  # the values that 4 bits stand for, with each matrix
OUTER_CODES = 256 * FLOAT32 + FLOAT32  # those that 8 bits of a scale stand for, and the mean


@dataclass(frozen=True)
class _Whole:
    """What a parameter is when it is not packed; as of bitsandbytes' own parameters."""

    shape: tuple[int, ...]


def will_be_packed(model: PreTrainedModel) -> list[nn.Module]:
    """The linear layers of a model, not adapted yet, that transformers quantizes: all except the
    head, tied ones, and those that an architecture keeps exact."""
    left_out = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    return [
        module
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D))
        and should_convert_module(name, left_out)
    ]


def pack(
    modules: Sequence[nn.Module], section: ModelSection, mode: FakeTensorMode, compute: torch.dtype
) -> None:
    """Store ``modules`` in the bits of ``section``. Products of 4 bits are computed in
    ``compute``."""
    is_4_bit = section.quantization_bit == 4
    for module in modules:
        shape = shape_of(module)
        size = (prod(shape) + 1) // 2 if is_4_bit else prod(shape)
        with mode:
            weight = nn.Parameter(torch.empty(size, dtype=torch.uint8), requires_grad=False)
            scales = torch.empty(scales_size(shape, section), dtype=torch.uint8)
        vars(weight)["quant_state"] = _Whole(shape)
        module.weight = weight
        module.register_buffer("scales", scales)
        module.forward = partial(_forward, shape, compute if is_4_bit else None)


def scales_size(shape: Sequence[int], section: ModelSection) -> int:
    """Bytes beside the weights of a matrix [O, I]: a float32 for each row of 8 bits, or for each
    ``BLOCK`` of 4 bits, which then may be quantized in their turn."""
    if section.quantization_bit == 8:
        return shape[0] * FLOAT32
    blocks = -(-prod(shape) // BLOCK)
    if not section.double_quantization:
        return blocks * FLOAT32 + CODES
    return blocks + -(-blocks // OUTER_BLOCK) * FLOAT32 + CODES + OUTER_CODES


def shape_of(module: nn.Module) -> tuple[int, int]:
    """[O, I]"""
    first, second = (int(size) for size in module.weight.shape)  # type: ignore[union-attr]
    return (second, first) if isinstance(module, Conv1D) else (first, second)


def _forward(shape: tuple[int, int], compute: torch.dtype | None, x: torch.Tensor) -> torch.Tensor:
    given = x if compute is None else x.to(compute)
    found: torch.Tensor = _Product.apply(given, shape, compute is None)  # type: ignore[no-untyped-call]
    return found.to(x.dtype)


class _Product(torch.autograd.Function):
    """The memory of x W': with 4 bits x is not saved, with 8 bits it is, rounded to 8 bits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: tuple[int, int], is_8_bit: bool) -> torch.Tensor:
        ctx.shape, ctx.entering, ctx.dtype = shape, x.shape, x.dtype
        if is_8_bit:
            half = x.to(torch.float16)
            half.to(torch.int8)
            ctx.save_for_backward(x)
        else:
            torch.empty(shape, dtype=x.dtype)
        return x.new_empty(*x.shape[:-1], shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        whole = gradients[0].new_empty(ctx.shape, dtype=ctx.dtype)
        found = whole.new_empty(ctx.entering)
        return found, None, None
