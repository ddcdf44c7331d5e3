"""compressed-tensors, as llm-compressor writes it for vLLM: integers or 8-bit floats with scales.

``weight_packed`` [O, I * bits / 32] contains integers, packed along the inputs and raised by half
of their range; an unpacked ``weight`` [O, I] is int8 or float8. ``weight_scale`` has the shape of
its strategy: [1], [O, 1], [O, G], or blocks [O / a, I / b]. Which modules are quantized is seen
from their tensors, so that ``targets`` and ``ignore`` are not needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Self

import torch

from ...errors import ModelError
from .form import (
    BITS,
    Kinds,
    Parts,
    QuantizedWeight,
    Read,
    Settings,
    Shape,
    expect,
    section,
    unpack,
)

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_DENSE = ("dense", None)
_ORDERED = ("group", "dynamic", "true")  # of ``actorder``
_SHAPE = "weight_shape"
_SCALE, _ZERO, _GROUPS = "weight_scale", "weight_zero_point", "weight_g_idx"
_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)
# Beside a weight: what quantizes the inputs and outputs of the module, which are not in training.
_OF_ACTIVATIONS = tuple(
    f"{side}_{what}"
    for side in ("input", "output")
    for what in ("scale", "zero_point", "global_scale")
)
_OF_CACHE = tuple(f"{part}_{what}" for part in "qkv" for what in ("scale", "zero_point"))


@dataclass(frozen=True)
class Scheme:
    """How the weights of one group of modules are quantized."""

    is_packed: bool
    bits: int
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    is_ordered: bool  # groups are of inputs in another order, which each module has

    def scales_of(self, shape: Shape) -> tuple[Shape, ...]:
        """The shapes that the scales of a weight of ``shape`` may have."""
        outputs, inputs = shape
        if self.strategy == "tensor":
            return (), (1,), (1, 1)
        if self.strategy == "channel":
            return (outputs, 1), (outputs,)
        if self.block is not None:
            return ((ceil(outputs / self.block[0]), ceil(inputs / self.block[1])),)
        assert self.group_size is not None
        return () if inputs % self.group_size else ((outputs, inputs // self.group_size),)

    def spread(self, found: torch.Tensor, shape: Shape, groups_I: torch.Tensor) -> torch.Tensor:
        """Scales or zero points, so that they can be multiplied with a weight of ``shape``."""
        if self.strategy in ("tensor", "channel"):
            return found.reshape(-1, 1)
        if self.block is not None:
            found = found.repeat_interleave(self.block[0], 0)[: shape[0]]
        return found[:, groups_I]


@dataclass(frozen=True)
class CompressedTensors:
    """The schemes of a model."""

    schemes: frozenset[Scheme]

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Raises ``ModelError``: sparse, rotated or fp4 weights, or numbers across words."""
        sparse = "sparsity_config.format"
        expect({sparse: section(settings, "sparsity_config").get("format")}, sparse, _DENSE, None)
        if section(settings, "transform_config").get("config_groups"):
            raise ModelError(
                "quantization_config.transform_config: inputs of layers are rotated, which is not "
                "computed"
            )
        groups = section(settings, "config_groups")
        found = (_scheme(name, section(groups, name), settings) for name in groups)
        return cls(frozenset(scheme for scheme in found if scheme is not None))

    def weights(self, stored: Kinds, read: Read) -> dict[str, QuantizedWeight]:
        """Of each module with a ``weight_scale``."""
        found, end = {}, f".{_SCALE}"
        for name in stored:
            if name.endswith(end):
                module = name.removesuffix(end)
                found[f"{module}.weight"] = self._weight(stored, read, module)
        return found

    def _weight(self, stored: Kinds, read: Read, module: str) -> QuantizedWeight:
        known = read(f"{module}.{_SHAPE}").tolist() if f"{module}.{_SHAPE}" in stored else None
        fitting = [one for one in self.schemes if _fits(one, stored, module, known)]
        if len(fitting) != 1:
            name = f"{module}.{_packed_or_not(stored, module)}"
            shape, dtype = stored.get(name, ((), None))
            how = "none" if not fitting else "several"
            raise ModelError(
                f"{name} ({str(dtype).removeprefix('torch.')} {list(shape)}, scales "
                f"{list(stored[f'{module}.{_SCALE}'][0])}) fits {how} of "
                "quantization_config.config_groups"
            )
        roles = [_SCALE, _packed_or_not(stored, module), _ZERO]
        parts = {role: f"{module}.{role}" for role in roles if f"{module}.{role}" in stored}
        shape = _shape(fitting[0], stored, module, known)
        if _ZERO in parts:
            _check_zeros(fitting[0], stored, module)
        name = f"{module}.{_GROUPS}"
        groups_I = _groups(fitting[0], shape, {name: read(name)} if name in stored else {})
        values = partial(_values, fitting[0], shape, groups_I)
        return QuantizedWeight(shape, parts, values, tuple(_unused(stored, module)))


def _scheme(name: str, group: Settings, settings: Settings) -> Scheme | None:
    """The scheme of one of the ``config_groups``; None if it leaves weights as they are."""
    where, weights = f"config_groups.{name}", section(group, "weights")
    if not weights:
        return None
    form = expect({where: group.get("format") or settings.get("format")}, where, _FORMATS, None)
    is_packed = form == "pack-quantized"
    bits = expect(weights, "num_bits", BITS if is_packed else (8,), 8)
    order = str(weights.get("actorder")).lower()
    strategies = ("tensor", "channel", "group", "block")
    size, block = weights.get("group_size"), _block(weights.get("block_structure"))
    usual = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = expect({"strategy": weights.get("strategy") or usual}, "strategy", strategies, usual)
    has_groups = isinstance(size, int) and size > 0
    if (strategy == "group") != has_groups or (strategy == "block") != (block is not None):
        raise ModelError(
            f"quantization_config.{where}: strategy {strategy} with group_size {size} and "
            f"block_structure {weights.get('block_structure')}"
        )
    assert isinstance(bits, int)
    found = size if isinstance(size, int) and strategy == "group" else None
    return Scheme(is_packed, bits, str(strategy), found, block, order in _ORDERED)


def _block(found: object) -> tuple[int, int] | None:
    """The rows and columns of a block, in files ``[128, 128]`` or ``128x128``."""
    if found is None:
        return None
    numbers = re.findall(r"\d+", str(found))
    if len(numbers) != 2 or "0" in numbers:
        raise ModelError(f"block_structure is {found!r}; expected two sizes")
    return int(numbers[0]), int(numbers[1])


def _packed_or_not(stored: Kinds, module: str) -> str:
    return "weight_packed" if f"{module}.weight_packed" in stored else "weight"


def _shape(scheme: Scheme, stored: Kinds, module: str, known: Sequence[int] | None) -> Shape:
    """[O, I]: as ``known``, or that of the packed numbers."""
    shape = stored[f"{module}.{_packed_or_not(stored, module)}"][0]
    if known is not None:
        return tuple(known)
    return (shape[0], shape[1] * 32 // scheme.bits) if scheme.is_packed else shape


def _fits(scheme: Scheme, stored: Kinds, module: str, known: Sequence[int] | None) -> bool:
    """Whether the tensors of a module have the dtypes and shapes of ``scheme``."""
    role = _packed_or_not(stored, module)
    found = stored.get(f"{module}.{role}")
    if found is None or scheme.is_packed != (role == "weight_packed") or len(found[0]) != 2:
        return False
    if scheme.is_ordered and f"{module}.{_GROUPS}" not in stored:
        return False
    dtypes = (torch.int32,) if scheme.is_packed else (torch.int8, *_FLOATS)
    scale, kind = stored[f"{module}.{_SCALE}"]
    shape = _shape(scheme, stored, module, known)
    if len(shape) != 2 or found[1] not in dtypes or not kind.is_floating_point:
        return False
    columns = ceil(shape[1] * scheme.bits / 32) if scheme.is_packed else shape[1]
    return found[0] == (shape[0], columns) and scale in scheme.scales_of(shape)


def _check_zeros(scheme: Scheme, stored: Kinds, module: str) -> None:
    """Raise ``ModelError`` unless there is a zero point for each scale."""
    found, dtype = stored[f"{module}.{_ZERO}"]
    expected = stored[f"{module}.{_SCALE}"][0]
    if scheme.is_packed and dtype == torch.int32:  # along the outputs
        expected = (ceil(expected[0] * scheme.bits / 32), *expected[1:])
    if found != expected:
        raise ModelError(f"{module}.{_ZERO} is {[*found]}, expected {[*expected]} for its scales")


def _unused(stored: Kinds, module: str) -> Iterator[str]:
    parent = module.rpartition(".")[0]
    read = (_SHAPE, _GROUPS)  # already
    for where, roles in ((module, (*read, *_OF_ACTIVATIONS)), (parent, _OF_CACHE)):
        yield from (f"{where}.{role}" for role in roles if f"{where}.{role}" in stored)


def _values(scheme: Scheme, shape: Shape, groups_I: torch.Tensor, parts: Parts) -> torch.Tensor:
    """[O, I] float32"""
    if scheme.is_packed:
        found_OI = _integers(parts["weight_packed"], scheme.bits, 1)[:, : shape[1]].float()
    else:
        found_OI = parts["weight"].to(torch.float32, copy=True)
    if (zeros := parts.get(_ZERO)) is not None:
        if scheme.is_packed and zeros.dtype == torch.int32:
            zeros = _integers(zeros, scheme.bits, 0)[: shape[0]]
        found_OI -= scheme.spread(zeros.float(), shape, groups_I)
    return found_OI.mul_(scheme.spread(parts[_SCALE].float(), shape, groups_I))


def _integers(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Signed integers, which are stored raised by half of their range."""
    return unpack(words, bits, dim) - (1 << (bits - 1))


def _groups(scheme: Scheme, shape: Shape, stored: Parts) -> torch.Tensor:
    """[I] the group of each input."""
    size = scheme.group_size if scheme.block is None else scheme.block[1]
    usual_I = torch.arange(shape[1]) // (size or shape[1])
    for name, found_I in stored.items():
        if bool((found_I == -1).all()) and not scheme.is_ordered:
            break
        if scheme.strategy != "group" or found_I.shape != usual_I.shape:
            raise ModelError(f"{name} is {[*found_I.shape]}, which fits no groups")
        if found_I.min() < 0 or found_I.max() > usual_I.max():
            raise ModelError(f"{name} names a group that does not exist")
        return found_I.long()
    return usual_I
