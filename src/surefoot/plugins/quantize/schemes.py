"""The schemes of ``--quantize`` for compressed-tensors, and the weights of a module in them.

Scales, rounding and packing are the functions of the package that reads them again. Legend of
shapes: O outputs, I inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import (
    calculate_qparams,
    maybe_pad_tensor_for_block_quant,
)
from compressed_tensors.version import __version__

from ...checkpoint.sources.source import Shape
from ...errors import CheckpointError, ModelError

PRESETS = {"fp8": "FP8_DYNAMIC", "fp8-block": "FP8_BLOCK", "w8a8": "W8A8", "w4a16": "W4A16"}
"""``--quantize``: the preset of the package."""
SCALE, SHAPE = "weight_scale", "weight_shape"
_SIZES = (128, 64, 32)  # of groups, which the kernels of vLLM have


@dataclass(frozen=True)
class WeightScheme:
    """How linear layers are quantized."""

    name: str  # of ``PRESETS``
    preset: QuantizationScheme

    @property
    def args(self) -> QuantizationArgs:
        """Those of the weights."""
        return self.preset.weights

    @property
    def is_integer(self) -> bool:
        """Whether the weights become integers, which calibration can choose."""
        return bool(self.args.type == "int")

    @cached_property
    def format(self) -> str:
        """The name of the layout in the files."""
        return str(infer_module_format(torch.nn.Linear, self.preset).value)

    @property
    def row_block(self) -> int:
        """Rows that share scales, and so are quantized together."""
        return int(self.args.block_structure[0]) if self.args.strategy == "block" else 1

    @property
    def column_block(self) -> int:
        """Inputs that share a scale; 1 if all do."""
        if self.args.strategy == "block":
            return int(self.args.block_structure[1])
        return int(self.args.group_size) if self.args.strategy == "group" else 1

    def parts(self, shape: Shape, dtype: torch.dtype) -> dict[str, tuple[Shape, torch.dtype]]:
        """The tensors that take the place of a weight [O, I]: shape and dtype by role."""
        rows, columns = shape
        groups = columns // self.column_block if self.column_block > 1 else 1
        scales = {SCALE: ((rows // self.row_block, groups), dtype)}
        if self.format == "pack-quantized":
            words = -(-columns * self.args.num_bits // 32)
            return {
                "weight_packed": ((rows, words), torch.int32),
                **scales,
                SHAPE: ((2,), torch.int64),
            }
        return {"weight": (shape, self.args.pytorch_dtype()), **scales}

    def check(self, shapes: Mapping[str, Shape], where: str) -> None:
        """Raise ``ModelError`` if a weight does not divide into the blocks that share a scale."""
        for name, (rows, columns) in shapes.items():
            if rows % self.row_block or columns % self.column_block:
                block = f"groups of {self.column_block} inputs"
                if self.args.strategy == "block":
                    block = f"blocks of {self.row_block} x {self.column_block}"
                fitting = [n for n in _SIZES if not any(shape[1] % n for shape in shapes.values())]
                cure = "--quantize fp8 or w8a8"
                if self.args.strategy == "group" and fitting:
                    cure = f"--group-size {fitting[0]}"
                raise ModelError(
                    f"{where}: {name} is {rows} x {columns}, which {block} do not divide; use "
                    f"{cure}"
                )

    def scales(self, weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zero points by the largest values: [O, 1], [O, G] or of blocks."""
        if self.args.strategy == "block":
            block = tuple(self.args.block_structure)
            padded: torch.Tensor = maybe_pad_tensor_for_block_quant(weight_OI, block)
            blocks = (-(-len(weight_OI) // block[0]), block[0], -1, block[1])
            split = padded.reshape(blocks)
            low, high = split.amin((1, 3)), split.amax((1, 3))
        else:
            size = self.column_block if self.column_block > 1 else weight_OI.shape[1]
            split = weight_OI.reshape(len(weight_OI), -1, size)
            low, high = split.amin(2), split.amax(2)
        found: tuple[torch.Tensor, torch.Tensor] = calculate_qparams(low, high, self.args)
        return found

    def compress(self, weight_OI: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
        """Complete rows of the weight ``name`` rounded to nearest: the tensors by role. Raises
        ``CheckpointError`` for NaN and infinity."""
        if not weight_OI.isfinite().all():
            raise CheckpointError(
                f"{name}: it contains NaN or infinite values; nothing was written"
            )
        return self.packed(weight_OI, *self.scales(weight_OI))

    def packed(
        self, weight_OI: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """A weight with these scales: the tensors by role. It is divided by them in float32: with 8
        bits of precision, rounding to 8 bits would go wrong by a step."""
        compressor = BaseCompressor.get_value_from_registry(self.format)
        state = {"weight": weight_OI.float(), SCALE: scales, "weight_zero_point": zeros}
        found: dict[str, torch.Tensor] = compressor.compress(state, self.preset)
        return found

    def config(self, ignored: list[str]) -> Mapping[str, Any]:
        """``quantization_config`` of a model whose modules ``ignored`` are not quantized."""
        groups = {"group_0": self.preset.model_copy(update={"format": self.format})}
        found = QuantizationConfig(
            config_groups=groups,
            format=self.format,
            quantization_status=QuantizationStatus.COMPRESSED,
            ignore=ignored,
        )
        return {"version": __version__, **found.model_dump(mode="json")}


def scheme_of(name: str, group_size: int | None = None) -> WeightScheme:
    """The scheme of that name. Raises ``ModelError`` for a group size where there are no groups."""
    preset = preset_name_to_scheme(PRESETS[name], ["Linear"])
    if group_size is None:
        return WeightScheme(name, preset)
    if preset.weights.strategy != "group":
        raise ModelError(f"--group-size: {name} has no groups of inputs; use --quantize w4a16")
    weights = preset.weights.model_copy(update={"group_size": group_size})
    return WeightScheme(name, preset.model_copy(update={"weights": weights}))
