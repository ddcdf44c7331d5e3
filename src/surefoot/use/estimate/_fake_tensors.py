"""The fake tensors of a dry run, which have shapes, dtypes and lifetimes, and are computed with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, ClassVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ...model.adapter_files import attach_empty
from ...model.loading import DTYPES
from ...model.numerics import PrecisionName
from ...model.pipeline_stages import plan_pipeline_stages
from ...model.section import ModelSection, Recomputation
from ...model.weight_matrices import refuse_read_weights
from ...network.draft import Draft, from_config, method_of
from ...network.runner import ModelForward
from ...parallel.sharded_model import layers
from ...parallel.sharding import chunk
from ...parallel.tensor_parallel import cut_tensors
from ...parallel.tp_plan import LayerRange, cuts_vocabulary
from ...parallel.vocab_parallel import VocabParallelLogits
from ...parallel.world import RowGroup


@dataclass(frozen=True)
class HoldingOptions:
    """Options that determine the form of a model in memory, beside its settings."""

    precision: PrecisionName
    dtype: torch.dtype | None  # weights before a method picks those that learn; None: as stored
    gathered: torch.dtype | None = None  # of all weights, where processes gather them in it
    recomputes: Recomputation = "none"
    tp: int = 1  # processes that share every matrix; of one of them, the first
    sequence_parallel: bool = False
    cp: int = 1  # processes that share every packed row; of one of them, the first
    num_stages: int = 1  # of a pipeline
    quantized: torch.dtype = torch.float32  # of products with quantized weights
    emulates_float8: bool = True  # as CPUs do


@dataclass
class FakeTensors:
    """Fake tensors, which can be computed with, of one of the ranks of ``setting``."""

    setting: HoldingOptions
    mode: FakeTensorMode = field(default_factory=FakeTensorMode)
    quantized: list[nn.Module] = field(default_factory=list)
    vocabulary: VocabParallelLogits | None = None  # of logits, where they are cut
    have_values: ClassVar[bool] = False

    @property
    def emulates_float8(self) -> bool:
        """Whether the machine that is planned for has no products in float8."""
        return self.setting.emulates_float8

    def load(self, draft: Draft) -> None:
        """From ``config.json`` alone, first on the meta device."""
        kernel = draft.section.attention
        if kernel == "flash_attention_2":
            kernel = "sdpa"  # has no CPU kernel; keeps the same
        with torch.device("meta"):
            draft.inner = from_config(
                draft.base,
                draft.section,
                dtype=self.setting.dtype,
                attention=None if kernel == "auto" else kernel,
            )

    def adapt(self, draft: Draft) -> None:
        """An adapter is not quantized, like the real one."""
        if draft.section.quantization_bit:
            self.quantized = will_be_packed(draft.inner)
        with torch.device("meta"):
            draft.module = method_of(draft, attach_empty)(draft.inner)

    def divide(self, draft: Draft) -> None:
        """Keep all layers. Raises ``RecipeError`` if a pipeline cannot be made of them."""
        if self.setting.num_stages > 1:
            plan_pipeline_stages(
                draft.inner, self.setting.num_stages, is_converted=draft.weights.is_converted
            )
        in_files = {p: draft.names[name] for name, p in draft.module.named_parameters()}
        draft.names = {name: in_files[p] for name, p in draft.module.named_parameters()}

    def shard(self, draft: Draft) -> None:
        """Make all tensors fake ones; keep the shards of the first rank along ``tp``."""
        setting, inner = self.setting, draft.inner
        _put(draft.module, self.mode, setting.gathered)
        pack(self.quantized, draft.section, self.mode, setting.quantized)
        if setting.tp > 1:
            refuse_read_weights(inner)
            axis, size = FakeAxis(setting.tp), inner.config.get_text_config().vocab_size
            self.vocabulary = VocabParallelLogits(axis, size) if cuts_vocabulary(inner) else None
            with self.mode:
                between = [LayerRange(layers(inner))] if setting.sequence_parallel else ()
                cut_tensors(inner, axis, between)

    def runner(self, draft: Draft) -> ModelForward:
        """The forward pass of the real model."""
        setting = self.setting
        return ModelForward(
            draft.module,
            setting.precision,
            self.vocabulary,
            draft.head if setting.tp == 1 else None,
            draft.heads.values,
            setting.tp if setting.sequence_parallel else 1,
            row_group=RowGroup(0, setting.cp) if setting.cp > 1 else None,
        )


def _put(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None) -> None:
    """Move a model from the meta device to fake tensors of a CPU; tied weights stay tied."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in moved:
                    with mode:
                        values = torch.empty(parameter.shape, dtype=dtype or parameter.dtype)
                    moved[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
                module._parameters[name] = moved[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                with mode:
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def held_dtype(name: str, *, on_gpu: bool) -> torch.dtype | None:
    """The dtype in which weights are loaded, of ``model.dtype``; None: as they are stored."""
    if name != "auto":
        return DTYPES[name]
    return None if on_gpu else torch.float32


@dataclass(frozen=True)
class FakeAxis:
    """A ``parallel.world.Axis`` without other ranks; the first has the largest shard."""

    size: int
    rank: int = 0

    def spread(self, whole: nn.Parameter, dim: int | None) -> nn.Parameter:
        """The shard of the first rank, as a plain tensor."""
        part = whole.detach()
        if dim is not None:
            part = part.narrow(dim, *chunk(part.shape[dim], self.size, self.rank)).clone()
        return nn.Parameter(part, requires_grad=whole.requires_grad)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Of the size of a sum."""
        return x.clone(memory_format=torch.contiguous_format)

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """Of the size of the largest."""
        return self.sum(x)

    def each(self, x: torch.Tensor) -> list[torch.Tensor]:
        """As many as there would be."""
        return [torch.empty_like(x) for _ in range(self.size)]

    def sum_of_mine(self, parts: torch.Tensor) -> torch.Tensor:
        """Of the size of a part."""
        return parts.new_empty(parts.shape[1:])


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
    compute_input = x if compute is None else x.to(compute)
    output: torch.Tensor = _Product.apply(compute_input, shape, compute is None)  # type: ignore[no-untyped-call]
    return output.to(x.dtype)


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
        weight = gradients[0].new_empty(ctx.shape, dtype=ctx.dtype)
        input_gradient = weight.new_empty(ctx.entering)
        return input_gradient, None, None
