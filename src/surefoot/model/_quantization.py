"""Forms of quantized weights that are read here, by ``quant_method`` in ``config.json``.

A form says which tensors of the files are parts of which weight, and computes its values. A new
form is one class and one line.

Legend of shapes: O outputs, I inputs, G groups of inputs that share a scale.

GPTQ (arXiv:2210.17323), as AutoGPTQ, GPTQModel and optimum write it.

``qweight`` [I * bits / 32, O] is packed along the inputs, ``qzeros`` [G, O * bits / 32] along the
outputs; ``scales`` [G, O]. Input i is of the group ``g_idx[i]``: with ``desc_act`` groups are of
inputs in another order. The weight is ``scale * (q - zero)``.

AWQ (arXiv:2306.00978), as AutoAWQ and GPTQModel write it for the kernel ``gemm``.

``qweight`` [I, O / 8] and ``qzeros`` [G, O / 8] are packed along the outputs, eight to a word,
first the even and then the odd ones; ``scales`` [G, O]. The weight is ``scale * (q - zero)``.

compressed-tensors, as llm-compressor writes it for vLLM: integers or 8-bit floats with scales.

``weight_packed`` [O, I * bits / 32] contains integers, packed along the inputs and raised by half
of their range; an unpacked ``weight`` [O, I] is int8 or float8. ``weight_scale`` has the shape of
its strategy: [1], [O, 1], [O, G], or blocks [O / a, I / b]. Which modules are quantized is seen
from their tensors, so that ``targets`` and ``ignore`` are not needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import ClassVar, Self

import torch

from ..errors import ModelError

Shape = tuple[int, ...]
Settings = Mapping[str, object]  # ``quantization_config`` of a ``config.json``
Kinds = Mapping[str, tuple[Shape, torch.dtype]]  # of each tensor in the files, by name
Parts = Mapping[str, torch.Tensor]  # by role
Read = Callable[[str], torch.Tensor]  # a tensor in the files, by name
BITS = (2, 4, 8)  # that a 32-bit word has a whole number of


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight whose values are computed from several tensors in the files."""

    shape: Shape
    parts: Mapping[str, str]  # their names by role, that of the scales first: it has the dtype
    values: Callable[[Parts], torch.Tensor]  # float32
    unused: Sequence[str] = ()  # tensors that only quantized activations need

    def compute(self, parts: Parts) -> torch.Tensor:
        """The values, rounded to the dtype of the scales, as libraries of the form compute them."""
        dtype = next(iter(parts.values())).dtype
        return self.values(parts).to(dtype)


def expect(settings: Settings, name: str, known: Sequence[object], default: object) -> object:
    """The value of a setting. Raises ``ModelError`` unless it is one of ``known``."""
    setting = settings.get(name, default)
    if setting not in known or isinstance(setting, bool) != isinstance(known[0], bool):
        listed = ", ".join(map(repr, known))
        raise ModelError(f"quantization_config.{name} is {setting!r}; supported: {listed}")
    return setting


def section(settings: Settings, name: str) -> Settings:
    """The settings under ``name``; none if it is missing. Raises ``ModelError`` for a value."""
    inner_settings = settings.get(name) or {}
    if not isinstance(inner_settings, Mapping):
        raise ModelError(f"quantization_config: {name} is {inner_settings!r}; expected settings")
    return inner_settings


def group_size_of(settings: Settings) -> int:
    """How many inputs share a scale; -1: all."""
    group_size = settings.get("group_size", 128)
    if (
        not isinstance(group_size, int)
        or isinstance(group_size, bool)
        or (group_size < 1 and group_size != -1)
    ):
        raise ModelError(
            f"quantization_config.group_size is {group_size!r}; expected -1 or more than 0"
        )
    return group_size


def unpack(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """The unsigned numbers in ``words`` (int32, two dimensions), of ``bits`` each, the lowest bits
    first, along ``dim``, as int16."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    spread = words.unsqueeze(dim + 1) >> shifts.view([-1 if d == dim + 1 else 1 for d in range(3)])
    return spread.bitwise_and_((1 << bits) - 1).to(torch.int16).flatten(dim, dim + 1)


_VERSIONS = ("gptq", "gptq_v2")


@dataclass(frozen=True)
class GPTQ:
    """Integers of ``bits``, with a scale and a zero point for each group of inputs. Its fields are
    the settings that decide the values."""

    bits: int
    group_size: int
    is_ordered: bool = False  # ``desc_act``
    is_v1: bool = False  # whose zero points are stored less 1
    packed_dim: ClassVar[int] = 0  # of ``qweight`` [I, O]

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """With the settings of a model. Raises ``ModelError`` for those that are not read: formats
        of kernels, 3 bits, or other settings of some modules."""
        name = next((n for n in ("checkpoint_format", "format") if settings.get(n)), "format")
        version = expect(settings, name, _VERSIONS, "gptq")
        bits = expect(settings, "bits", BITS, None)
        others = [rule for rule, overrides in section(settings, "dynamic").items() if overrides]
        if others:
            raise ModelError(
                f"quantization_config.dynamic has settings of its own for {others[0]!r}, which are "
                "not read"
            )
        assert isinstance(bits, int)
        order = bool(settings.get("desc_act", False))
        return cls(bits, group_size_of(settings), order, version == "gptq")

    def weights(self, stored: Kinds, read: Read) -> dict[str, QuantizedWeight]:
        """The quantized weights among the tensors ``stored``, by the names of weights: of each
        module with a ``qweight``. Small tensors are read and checked. Raises ``ModelError`` if a
        part is missing, or contradicts the others or the settings."""
        modules = [n.removesuffix(".qweight") for n in stored if n.endswith(".qweight")]
        return {f"{module}.weight": self._weight(stored, read, module) for module in modules}

    def _weight(self, stored: Kinds, read: Read, module: str) -> QuantizedWeight:
        roles = ["scales", "qweight", "qzeros"]
        order = [f"{module}.g_idx"] if f"{module}.g_idx" in stored or self.is_ordered else []
        parts = {role: f"{module}.{role}" for role in roles}
        for name in [*parts.values(), *order]:
            if name not in stored:
                raise ModelError(f"{name} is missing, a part of the quantized weight of {module}")
        packed, per_word = stored[parts["qweight"]][0], 32 // self.bits
        inputs, outputs = (
            n * per_word if d == self.packed_dim else n for d, n in enumerate(packed)
        )
        groups = self._num_groups(inputs, module)
        shapes = {parts["qweight"]: packed, parts["qzeros"]: (groups, ceil(outputs / per_word))}
        shapes |= {parts["scales"]: (groups, outputs)} | dict.fromkeys(order, (inputs,))
        for name, shape in shapes.items():
            stored_shape, dtype = stored[name]
            kind = "floating point" if name == parts["scales"] else "int32"
            is_right = dtype.is_floating_point if name == parts["scales"] else dtype == torch.int32
            if stored_shape != shape or not is_right:
                raise ModelError(
                    f"{name} is {str(dtype).removeprefix('torch.')} {list(stored_shape)}, "
                    f"expected {kind} {list(shape)} by quantization_config"
                )
        if self.is_v1:
            self._refuse_borrowed(parts["qzeros"], read)
        groups_I = self._groups(inputs, groups, {name: read(name) for name in order})
        return QuantizedWeight((outputs, inputs), parts, partial(self._values, groups_I), order)

    def _num_groups(self, inputs: int, _module: str) -> int:
        return 1 if self.group_size == -1 else ceil(inputs / self.group_size)

    def _unpacked(self, words: torch.Tensor, dim: int) -> torch.Tensor:
        return unpack(words, self.bits, dim)

    def _values(self, groups_I: torch.Tensor, parts: Parts) -> torch.Tensor:
        scales_GO = parts["scales"].float()
        q_IO = self._unpacked(parts["qweight"], self.packed_dim)
        zeros_GO = self._unpacked(parts["qzeros"], 1)[:, : scales_GO.shape[1]]
        if self.is_v1:
            zeros_GO = zeros_GO + 1
        return (q_IO - zeros_GO[groups_I]).float().mul_(scales_GO[groups_I]).T.contiguous()

    def _groups(self, inputs: int, count: int, stored: Parts) -> torch.Tensor:
        """[I] the group of each input."""
        usual_I = torch.arange(inputs) // (inputs if self.group_size == -1 else self.group_size)
        for name, groups in stored.items():
            found_I = groups.long()
            if found_I.min() < 0 or found_I.max() >= count:
                raise ModelError(f"{name} names a group that is not one of its {count}")
            if not self.is_ordered and not torch.equal(found_I, usual_I):
                raise ModelError(
                    f"{name} puts inputs into other groups than quantization_config.desc_act: "
                    "false says, so programs differ in what they read"
                )
            return found_I
        return usual_I

    def _refuse_borrowed(self, name: str, read: Read) -> None:
        """Raise ``ModelError`` for a zero point of 0. It has no representation less 1: writers
        differ in what they store, and some change the numbers beside it."""
        top = (1 << self.bits) - 1
        if (unpack(read(name), self.bits, 1) == top).any():
            raise ModelError(
                f"{name} has a zero point of 0 or {top + 1}, which the format gptq does not "
                "distinguish; gptq_v2 does"
            )


_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # in a word of AWQ, of each of eight outputs


@dataclass(frozen=True)
class AWQ(GPTQ):
    """The same with integers of 4 bits, packed along the outputs in an order of their own."""

    packed_dim: ClassVar[int] = 1

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Raises ``ModelError``: the layout of another kernel, or no zero points."""
        version_keys = ("checkpoint_format", "format", "version")
        for name in [n for n in version_keys if settings.get(n) is not None] or ["version"]:
            lower = {name: str(settings.get(name, "gemm")).lower()}
            expect(lower, name, ("gemm",), "gemm")
        expect(settings, "bits", (4,), 4)
        expect(settings, "zero_point", (True,), True)
        if settings.get("backend") == "llm-awq":
            raise ModelError("quantization_config.backend is 'llm-awq', whose layout is not read")
        return cls(4, group_size_of(settings))

    def _num_groups(self, inputs: int, module: str) -> int:
        if self.group_size != -1 and inputs % self.group_size:
            size = self.group_size
            raise ModelError(f"{module} has {inputs} inputs, which groups of {size} do not divide")
        return super()._num_groups(inputs, module)

    def _unpacked(self, words: torch.Tensor, dim: int) -> torch.Tensor:
        """The numbers in ``words`` by their outputs."""
        numbers = super()._unpacked(words, dim).view(len(words), -1, len(_PLACES))
        return numbers[:, :, _PLACES].flatten(1)


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

    def spread(
        self, scales_or_zeros: torch.Tensor, shape: Shape, groups_I: torch.Tensor
    ) -> torch.Tensor:
        """Scales or zero points, so that they can be multiplied with a weight of ``shape``."""
        if self.strategy in ("tensor", "channel"):
            return scales_or_zeros.reshape(-1, 1)
        if self.block is not None:
            scales_or_zeros = scales_or_zeros.repeat_interleave(self.block[0], 0)[: shape[0]]
        return scales_or_zeros[:, groups_I]


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
        schemes = (_scheme(name, section(groups, name), settings) for name in groups)
        return cls(frozenset(scheme for scheme in schemes if scheme is not None))

    def weights(self, stored: Kinds, read: Read) -> dict[str, QuantizedWeight]:
        """Of each module with a ``weight_scale``."""
        quantized, end = {}, f".{_SCALE}"
        for name in stored:
            if name.endswith(end):
                module = name.removesuffix(end)
                quantized[f"{module}.weight"] = self._weight(stored, read, module)
        return quantized

    def _weight(self, stored: Kinds, read: Read, module: str) -> QuantizedWeight:
        stored_shape = (
            read(f"{module}.{_SHAPE}").tolist() if f"{module}.{_SHAPE}" in stored else None
        )
        fitting = [scheme for scheme in self.schemes if _fits(scheme, stored, module, stored_shape)]
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
        shape = _shape(fitting[0], stored, module, stored_shape)
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
    group_size = size if isinstance(size, int) and strategy == "group" else None
    return Scheme(is_packed, bits, str(strategy), group_size, block, order in _ORDERED)


def _block(block_structure: object) -> tuple[int, int] | None:
    """The rows and columns of a block, in files ``[128, 128]`` or ``128x128``."""
    if block_structure is None:
        return None
    numbers = re.findall(r"\d+", str(block_structure))
    if len(numbers) != 2 or "0" in numbers:
        raise ModelError(f"block_structure is {block_structure!r}; expected two sizes")
    return int(numbers[0]), int(numbers[1])


def _packed_or_not(stored: Kinds, module: str) -> str:
    return "weight_packed" if f"{module}.weight_packed" in stored else "weight"


def _shape(scheme: Scheme, stored: Kinds, module: str, stored_shape: Sequence[int] | None) -> Shape:
    """[O, I]: as ``stored_shape``, or that of the packed numbers."""
    shape = stored[f"{module}.{_packed_or_not(stored, module)}"][0]
    if stored_shape is not None:
        return tuple(stored_shape)
    return (shape[0], shape[1] * 32 // scheme.bits) if scheme.is_packed else shape


def _fits(scheme: Scheme, stored: Kinds, module: str, stored_shape: Sequence[int] | None) -> bool:
    """Whether the tensors of a module have the dtypes and shapes of ``scheme``."""
    role = _packed_or_not(stored, module)
    weight_shape, weight_dtype = stored.get(f"{module}.{role}", ((), None))
    if scheme.is_packed != (role == "weight_packed") or len(weight_shape) != 2:
        return False
    if scheme.is_ordered and f"{module}.{_GROUPS}" not in stored:
        return False
    dtypes = (torch.int32,) if scheme.is_packed else (torch.int8, *_FLOATS)
    scale_shape, scale_dtype = stored[f"{module}.{_SCALE}"]
    shape = _shape(scheme, stored, module, stored_shape)
    if len(shape) != 2 or weight_dtype not in dtypes or not scale_dtype.is_floating_point:
        return False
    columns = ceil(shape[1] * scheme.bits / 32) if scheme.is_packed else shape[1]
    return weight_shape == (shape[0], columns) and scale_shape in scheme.scales_of(shape)


def _check_zeros(scheme: Scheme, stored: Kinds, module: str) -> None:
    """Raise ``ModelError`` unless there is a zero point for each scale."""
    zeros_shape, dtype = stored[f"{module}.{_ZERO}"]
    expected = stored[f"{module}.{_SCALE}"][0]
    if scheme.is_packed and dtype == torch.int32:  # along the outputs
        expected = (ceil(expected[0] * scheme.bits / 32), *expected[1:])
    if zeros_shape != expected:
        raise ModelError(
            f"{module}.{_ZERO} is {[*zeros_shape]}, expected {[*expected]} for its scales"
        )


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


Form = GPTQ | CompressedTensors
FORMS: Mapping[str, type[GPTQ] | type[CompressedTensors]] = {
    "gptq": GPTQ,
    "awq": AWQ,
    "compressed-tensors": CompressedTensors,
}
