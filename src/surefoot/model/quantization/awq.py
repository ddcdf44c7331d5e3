"""AWQ (arXiv:2306.00978), as AutoAWQ and GPTQModel write it for the kernel ``gemm``.

``qweight`` [I, O / 8] and ``qzeros`` [G, O / 8] are packed along the outputs, eight to a word,
first the even and then the odd ones; ``scales`` [G, O]. The weight is ``scale * (q - zero)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from ...errors import ModelError
from .form import (
    Kinds,
    Parts,
    QuantizedWeight,
    Read,
    Settings,
    check_kind,
    divide,
    expect,
    group_size_of,
    parts_of,
    unpack,
)

_BITS, _PER_WORD = 4, 8
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # in its word, of each of eight outputs


@dataclass(frozen=True)
class AWQ:
    """Integers of 4 bits, with a scale and a zero point for each group of inputs."""

    group_size: int

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Raises ``ModelError``: the layout of another kernel, or no zero points."""
        named = ("checkpoint_format", "format", "version")
        for name in [n for n in named if settings.get(n) is not None] or ["version"]:
            lower = {name: str(settings.get(name, "gemm")).lower()}
            expect(lower, name, ("gemm",), "gemm")
        expect(settings, "bits", (_BITS,), _BITS)
        expect(settings, "zero_point", (True,), True)
        if settings.get("backend") == "llm-awq":
            raise ModelError("quantization_config.backend is 'llm-awq', whose layout is not read")
        return cls(group_size_of(settings))

    def weights(self, stored: Kinds, read: Read) -> dict[str, QuantizedWeight]:
        """Of each module with a ``qweight``."""
        modules = [n.removesuffix(".qweight") for n in stored if n.endswith(".qweight")]
        return {f"{module}.weight": self._weight(stored, module) for module in modules}

    def _weight(self, stored: Kinds, module: str) -> QuantizedWeight:
        parts = parts_of(stored, module, ["scales", "qweight", "qzeros"])
        inputs, words = stored[parts["qweight"]][0]
        size = inputs if self.group_size == -1 else self.group_size
        groups, outputs = divide(inputs, size, module), words * _PER_WORD
        check_kind(stored, parts["qweight"], (inputs, words), is_packed=True)
        check_kind(stored, parts["qzeros"], (groups, words), is_packed=True)
        check_kind(stored, parts["scales"], (groups, outputs), is_packed=False)
        return QuantizedWeight((outputs, inputs), parts, self._values)

    def _values(self, parts: Parts) -> torch.Tensor:
        q_IO, zeros_GO = (_in_order(parts[role]) for role in ("qweight", "qzeros"))
        scales_GO = parts["scales"].float()
        repeats = len(q_IO) // len(scales_GO)
        zeros_IO, scales_IO = (t.repeat_interleave(repeats, 0) for t in (zeros_GO, scales_GO))
        return (q_IO - zeros_IO).float().mul_(scales_IO).T.contiguous()


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """The numbers in ``words`` by their outputs."""
    found = unpack(words, _BITS, 1).view(len(words), -1, _PER_WORD)
    return found[:, :, _PLACES].flatten(1)
