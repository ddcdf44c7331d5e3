"""The schemes of ``--quantize`` for compressed-tensors, and the weights of a module in them.

Scales, rounding and packing are the functions of the package that reads them again. Legend of
shapes: O outputs, I inputs, G groups of inputs that share a scale.

Which weights of a model are quantized: those of linear layers and of experts, except the output
head, routers of experts and gates, which are small and decide much.

A view of a source in which the weights of linear layers are quantized, rows by rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
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
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.version import __version__
from torch import nn
from transformers import PreTrainedModel

from ...checkpoint.sources import Shape, TensorSource, once
from ...errors import CheckpointError, ModelError
from ...model.weights import FullWeights, FusedPlacement, names_in_files, places
from ...parallel.sharding import Box

_KEPT = re.compile(r"(^|\.)(gate|router|\w+_gate)$")
_ROUTERS = re.compile(r"Router|Gating|Gate(?![a-z])")  # classes without the type Linear


@dataclass(frozen=True)
class LinearLayers:
    """The layers of a model."""

    weights: Mapping[str, str]  # of those that are quantized: name in the files by module
    ignored: list[str]  # modules that vLLM and transformers must not expect quantized
    experts: Mapping[str, FusedPlacement] = field(default_factory=dict)  # by name in the files

    @property
    def ordered(self) -> list[str]:
        """The names in the files of all weights that are quantized."""
        return [*self.weights.values(), *self.experts]

    @property
    def names(self) -> frozenset[str]:
        """``ordered`` as a set, in which names are looked up."""
        return frozenset(self.ordered)


def find_linear_layers(
    model: PreTrainedModel, stored: Mapping[str, Shape], where: str
) -> LinearLayers:
    """The layers of ``model``, whose files contain the tensors ``stored``. Raises ``ModelError`` if
    there are none, or experts that are one tensor in the files."""
    experts = _experts(model, stored, where)
    names = names_in_files(model, FullWeights(model).state_dict())
    head = model.get_output_embeddings()
    weights, ignored = dict[str, str](), list[str]()
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear)
        in_files = names.get(f"{name}.weight", f"{name}.weight")
        if is_linear and module is not head and not _KEPT.search(name):
            weights[name] = in_files
        elif is_linear or _ROUTERS.search(type(module).__name__):
            ignored += dict.fromkeys((name, in_files.removesuffix(".weight")))
    if not weights or not set(weights.values()) <= stored.keys():
        missing = sorted(set(weights.values()) - stored.keys())
        raise ModelError(
            f"{where}: has no {missing[0]}, which the model needs"
            if missing
            else f"{where}: has no linear layers besides the output head; nothing to quantize"
        )
    return LinearLayers(weights, ignored, experts)


def _experts(
    model: PreTrainedModel, stored: Mapping[str, Shape], where: str
) -> dict[str, FusedPlacement]:
    """The weights of experts, each a matrix in the files."""
    # Mamba's have three dimensions, too.
    convolutions = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv1d)}
    parameters = model.named_parameters()
    fused = [name for name, p in parameters if p.ndim == 3 and id(p) not in convolutions]
    try:
        placements = places(model) if fused else {}
    except ModelError:  # transformers does more than to join them
        placements = {}
    split = {at.fused for at in placements.values() if at.fused in fused}
    if odd := [name for name in fused if name not in split]:
        raise ModelError(
            f"{where}: {odd[0]} contains the weights of several experts, which compressed-tensors "
            "cannot have as one tensor; use --to gguf"
        )
    if missing := sorted(name for name in placements if name not in stored):
        raise ModelError(
            f"{where}: has no {missing[0]}; the weights of several experts are one tensor in its "
            "files, which compressed-tensors cannot have; use --to gguf"
        )
    return placements


PRESETS = {"fp8": "FP8_DYNAMIC", "w8a8": "W8A8", "w4a16": "W4A16"}
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
    def group_size(self) -> int | None:
        """Inputs that share a scale; None if all do."""
        return int(self.args.group_size) if self.args.strategy == "group" else None

    def parts(self, shape: Shape, dtype: torch.dtype) -> dict[str, tuple[Shape, torch.dtype]]:
        """The tensors that take the place of a weight [O, I]: shape and dtype by role."""
        rows, columns = shape
        groups = 1 if self.group_size is None else columns // self.group_size
        scales = {SCALE: ((rows, groups), dtype)}
        if self.format == "pack-quantized":
            # The last word of a row may be only partly full.
            words = -(-columns * self.args.num_bits // 32)
            return {
                "weight_packed": ((rows, words), torch.int32),
                **scales,
                SHAPE: ((2,), torch.int64),
            }
        return {"weight": (shape, self.args.pytorch_dtype()), **scales}

    def check(self, shapes: Mapping[str, Shape], where: str) -> None:
        """Raise ``ModelError`` if a weight does not divide into groups that share a scale."""
        for name, (rows, columns) in shapes.items():
            if self.group_size is not None and columns % self.group_size:
                fitting = [n for n in _SIZES if not any(shape[1] % n for shape in shapes.values())]
                cure = f"--group-size {fitting[0]}" if fitting else "--quantize fp8 or w8a8"
                raise ModelError(
                    f"{where}: {name} is {rows} x {columns}, which groups of {self.group_size} "
                    f"inputs do not divide; use {cure}"
                )

    def scales(self, weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zero points by the largest values: [O, 1] or [O, G]."""
        size = self.group_size or weight_OI.shape[1]
        split_OGI = weight_OI.reshape(len(weight_OI), -1, size)
        low_OG, high_OG = split_OGI.amin(2), split_OGI.amax(2)
        scales: tuple[torch.Tensor, torch.Tensor] = calculate_qparams(low_OG, high_OG, self.args)
        return scales

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
        tensors: dict[str, torch.Tensor] = compressor.compress(state, self.preset)
        return tensors

    def config(self, ignored: list[str]) -> Mapping[str, Any]:
        """``quantization_config`` of a model whose modules ``ignored`` are not quantized."""
        groups = {"group_0": self.preset.model_copy(update={"format": self.format})}
        quantization = QuantizationConfig(
            config_groups=groups,
            format=self.format,
            quantization_status=QuantizationStatus.COMPRESSED,
            ignore=ignored,
        )
        return {"version": __version__, **quantization.model_dump(mode="json")}


def scheme_of(name: str, group_size: int | None = None) -> WeightScheme:
    """The scheme of that name. Raises ``ModelError`` for a group size where there are no groups."""
    preset = preset_name_to_scheme(PRESETS[name], ["Linear"])
    if group_size is None:
        return WeightScheme(name, preset)
    if preset.weights.strategy != "group":
        raise ModelError(f"--group-size: {name} has no groups of inputs; use --quantize w4a16")
    weights = preset.weights.model_copy(update={"group_size": group_size})
    return WeightScheme(name, preset.model_copy(update={"weights": weights}))


_CHUNK = 1 << 20  # weights that are quantized at a time


@dataclass(frozen=True)
class QuantizedSource:
    """``source`` with the tensors of a ``scheme`` in the place of each of ``weights``. They are
    rounded as they are read, so memory grows neither with the model nor with a tensor."""

    source: TensorSource
    scheme: WeightScheme
    weights: frozenset[str]

    @once
    def _parts(self) -> Mapping[str, tuple[str, str, Shape, torch.dtype]]:
        """Weight, role, shape and dtype of every new tensor."""
        shapes, dtypes = self.source.shapes(), self.source.dtypes()
        return {
            f"{name.removesuffix('weight')}{role}": (name, role, *shape_and_dtype)
            for name in shapes
            if name in self.weights
            for role, shape_and_dtype in self.scheme.parts(shapes[name], dtypes[name]).items()
        }

    @once
    def shapes(self) -> Mapping[str, Shape]:
        """Of the new tensors, and of the others."""
        unchanged = {n: s for n, s in self.source.shapes().items() if n not in self.weights}
        return unchanged | {name: part[2] for name, part in self._parts().items()}

    @once
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Of the new tensors, and of the others."""
        unchanged = {n: d for n, d in self.source.dtypes().items() if n not in self.weights}
        return unchanged | {name: part[3] for name, part in self._parts().items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Computed from the rows of the weight that it depends on."""
        if name not in self._parts():
            return self.source.read(name, box)
        weight, role, shape, _ = self._parts()[name]
        if role == SHAPE:
            return torch.tensor(self.source.shapes()[weight])[box.slices_in(Box.whole(shape))]
        # All columns, whatever the box: the groups of a scale must be complete.
        columns = self.source.shapes()[weight][1]
        step = max(1, _CHUNK // columns)
        parts = []
        for first in range(box.start[0], box.stop[0], step):
            rows = Box((first, 0), (min(step, box.stop[0] - first), columns))
            parts.append(self.scheme.compress(self.source.read(weight, rows), weight)[role])
        _, columns_of_box = box.slices_in(Box.whole(shape))
        return torch.cat(parts)[:, columns_of_box]
