"""What a form of quantized weights states, and what forms share.

Legend of shapes: O outputs, I inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch

from ...errors import ModelError

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


class Form(Protocol):
    """One form of quantized weights. Its fields are the settings that decide the values."""

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """With the settings of a model. Raises ``ModelError`` for those that are not read."""

    def weights(self, stored: Kinds, read: Read) -> dict[str, QuantizedWeight]:
        """The quantized weights among the tensors ``stored``, by the names of weights. Small ones
        are read and checked. Raises ``ModelError`` if a part is missing, or contradicts the others
        or the settings."""


def expect(settings: Settings, name: str, known: Sequence[object], default: object) -> object:
    """The value of a setting. Raises ``ModelError`` unless it is one of ``known``."""
    found = settings.get(name, default)
    if found not in known or isinstance(found, bool) != isinstance(known[0], bool):
        listed = ", ".join(map(repr, known))
        raise ModelError(f"quantization_config.{name} is {found!r}; supported: {listed}")
    return found


def section(settings: Settings, name: str) -> Settings:
    """The settings under ``name``; none if it is missing. Raises ``ModelError`` for a value."""
    found = settings.get(name) or {}
    if not isinstance(found, Mapping):
        raise ModelError(f"quantization_config: {name} is {found!r}; expected settings")
    return found


def group_size_of(settings: Settings) -> int:
    """How many inputs share a scale; -1: all."""
    found = settings.get("group_size", 128)
    if not isinstance(found, int) or isinstance(found, bool) or (found < 1 and found != -1):
        raise ModelError(f"quantization_config.group_size is {found!r}; expected -1 or more than 0")
    return found


def parts_of(stored: Kinds, module: str, roles: Sequence[str]) -> dict[str, str]:
    """The names of the parts of a module. Raises ``ModelError`` if one is missing."""
    names = {role: f"{module}.{role}" for role in roles}
    for name in names.values():
        if name not in stored:
            raise ModelError(f"{name} is missing, a part of the quantized weight of {module}")
    return names


def check_kind(stored: Kinds, name: str, shape: Shape, *, is_packed: bool) -> None:
    """Raise ``ModelError`` unless a tensor has ``shape``, and is of 32-bit words if ``is_packed``,
    of floating point numbers if not."""
    found, dtype = stored[name]
    is_right = dtype == torch.int32 if is_packed else dtype.is_floating_point
    if found != shape or not is_right:
        kind = "int32" if is_packed else "floating point"
        raise ModelError(
            f"{name} is {str(dtype).removeprefix('torch.')} {list(found)}, expected {kind} "
            f"{list(shape)} by quantization_config"
        )


def divide(inputs: int, size: int, module: str) -> int:
    """The number of groups of ``size``. Raises ``ModelError`` if the last one would be smaller."""
    if inputs % size:
        raise ModelError(f"{module} has {inputs} inputs, which groups of {size} do not divide")
    return inputs // size


def unpack(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """The unsigned numbers in ``words`` (int32, two dimensions), of ``bits`` each, the lowest bits
    first, along ``dim``, as int16."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    spread = words.unsqueeze(dim + 1) >> shifts.view([-1 if d == dim + 1 else 1 for d in range(3)])
    return spread.bitwise_and_((1 << bits) - 1).to(torch.int16).flatten(dim, dim + 1)
