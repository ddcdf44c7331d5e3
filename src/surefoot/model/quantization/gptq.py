"""GPTQ (arXiv:2210.17323), as AutoGPTQ, GPTQModel and optimum write it.

``qweight`` [I * bits / 32, O] is packed along the inputs, ``qzeros`` [G, O * bits / 32] along the
outputs; ``scales`` [G, O]. Input i is of the group ``g_idx[i]``: with ``desc_act`` groups are of
inputs in another order. The weight is ``scale * (q - zero)``.
"""

from __future__ import annotations

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
    check_kind,
    expect,
    group_size_of,
    parts_of,
    section,
    unpack,
)

_FORMATS = ("gptq", "gptq_v2")


@dataclass(frozen=True)
class GPTQ:
    """Integers of ``bits``, with a scale and a zero point for each group of inputs."""

    bits: int
    group_size: int
    is_ordered: bool  # ``desc_act``
    is_v1: bool  # whose zero points are stored less 1

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Raises ``ModelError``: formats of kernels, 3 bits, or other settings of some modules."""
        name = next((n for n in ("checkpoint_format", "format") if settings.get(n)), "format")
        version = expect(settings, name, _FORMATS, "gptq")
        bits = expect(settings, "bits", BITS, None)
        others = [rule for rule, own in section(settings, "dynamic").items() if own]
        if others:
            raise ModelError(
                f"quantization_config.dynamic has settings of its own for {others[0]!r}, which are "
                "not read"
            )
        assert isinstance(bits, int)
        order = bool(settings.get("desc_act", False))
        return cls(bits, group_size_of(settings), order, version == "gptq")

    def weights(self, stored: Kinds, read: Read) -> dict[str, QuantizedWeight]:
        """Of each module with a ``qweight``."""
        modules = [n.removesuffix(".qweight") for n in stored if n.endswith(".qweight")]
        return {f"{module}.weight": self._weight(stored, read, module) for module in modules}

    def _weight(self, stored: Kinds, read: Read, module: str) -> QuantizedWeight:
        parts = parts_of(stored, module, ["scales", "qweight", "qzeros"])
        (rows, outputs), per_word = stored[parts["qweight"]][0], 32 // self.bits
        inputs = rows * per_word
        groups = 1 if self.group_size == -1 else ceil(inputs / self.group_size)
        check_kind(stored, parts["qweight"], (rows, outputs), is_packed=True)
        check_kind(stored, parts["qzeros"], (groups, ceil(outputs / per_word)), is_packed=True)
        check_kind(stored, parts["scales"], (groups, outputs), is_packed=False)
        if self.is_v1:
            self._refuse_borrowed(parts["qzeros"], read)
        order = [f"{module}.g_idx"] if f"{module}.g_idx" in stored or self.is_ordered else []
        for name in order:
            parts_of(stored, module, ["g_idx"])
            check_kind(stored, name, (inputs,), is_packed=True)
        groups_I = self._groups(inputs, groups, {name: read(name) for name in order})
        return QuantizedWeight((outputs, inputs), parts, partial(self._values, groups_I), order)

    def _values(self, groups_I: torch.Tensor, parts: Parts) -> torch.Tensor:
        scales_GO = parts["scales"].float()
        q_IO = unpack(parts["qweight"], self.bits, 0)
        zeros_GO = unpack(parts["qzeros"], self.bits, 1)[:, : scales_GO.shape[1]]
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
