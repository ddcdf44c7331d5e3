"""Several LoRA adapters in one pass: each row of a batch has its own, or none.

The layers of the base compute all rows at once, with PEFT's adapters switched off. A forward hook
then adds to the rows of each adapter what PEFT's layer would: ``x A^T B^T * scaling``. The rows of
an adapter are computed in multiples of 4: then a row has the same bits whatever is beside it, on
some CPUs in float32.

PEFT's own ``adapter_names`` does the same, but for that multiple, for types narrower than float32
(it rounds the product before it adds it), and for a hook in every layer that it adds and removes in
each pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_ROWS = 4  # of which a product has a multiple


@dataclass(frozen=True)
class _Group:
    """The rows of one adapter."""

    name: str
    places: torch.Tensor | None  # [n] in the batch; None: all of it
    filled: torch.Tensor | None  # [m] the same, and the first again up to a multiple of 4


class AdaptersByRow:
    """The adapters of PEFT's layers in one model, of which rows choose. Call ``attach`` after
    adapters came or went."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._groups: list[_Group] = []
        self._num_rows = 0
        self._device = torch.device("cpu")

    def attach(self, model: nn.Module) -> None:
        """Watch the layers that ``model`` has now."""
        from peft.tuners.lora import Linear

        for handle in self._handles:
            handle.remove()
        layers = [layer for layer in model.modules() if type(layer) is Linear]
        self._handles = [layer.register_forward_hook(self._add) for layer in layers]
        self._device = next(model.parameters()).device

    @contextmanager
    def on(self, names: Sequence[str | None]) -> Iterator[None]:
        """A block in which the rows of a pass have these adapters; PEFT's must be switched off."""
        self._num_rows, self._groups = len(names), self._grouped(names)
        try:
            yield
        finally:
            self._groups = []

    def _grouped(self, names: Sequence[str | None]) -> list[_Group]:
        found = []
        for name in dict.fromkeys(names):
            places = [place for place, other in enumerate(names) if other == name]
            if name is None:
                continue
            if len(places) == len(names) and not len(names) % _ROWS:
                found.append(_Group(name, None, None))
                continue
            filled = [*places, *places[:1] * (-len(places) % _ROWS)]
            both = (torch.tensor(each, device=self._device) for each in (places, filled))
            found.append(_Group(name, *both))
        return found

    def _add(
        self, layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor | None:
        """The output of a layer of the base, with what the adapters of the rows add."""
        for group in self._groups:
            if len(inputs[0]) != self._num_rows:
                raise ValueError(
                    f"a layer got {len(inputs[0])} rows, where the batch has {self._num_rows}"
                )
            if group.name in layer.lora_A:  # type: ignore[operator]
                output = _added(layer, group, inputs[0], output)
        return output if self._groups else None


def _added(layer: Any, group: _Group, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """``output`` with the product of one adapter on its rows. As PEFT, it is added before it is
    rounded to the type of the output."""
    first, second = layer.lora_A[group.name], layer.lora_B[group.name]
    scaling = layer.scaling[group.name]
    if group.places is None or group.filled is None:
        whole: torch.Tensor = output + second(first(x.to(first.weight.dtype))) * scaling
        return whole.to(output.dtype)
    num_tokens = x.numel() // (len(x) * x.shape[-1])
    chosen = group.filled if num_tokens % _ROWS else group.places
    added = second(first(x[chosen].to(first.weight.dtype)))[: len(group.places)] * scaling
    mixed = (output[group.places] + added).to(output.dtype)
    return output.index_copy(0, group.places, mixed)


def can_be_by_row(model: nn.Module, name: str) -> bool:
    """Whether all that the adapter ``name`` adds to ``model`` are plain products of linear layers:
    no DoRA or other variant, no embedding, no parameter, no quantized layer."""
    from peft.tuners.lora import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [one for one in model.modules() if isinstance(one, BaseTunerLayer) and _has(one, name)]
    return all(type(one) is Linear and name not in one.lora_variant for one in layers)


def _has(layer: Any, name: str) -> bool:
    return any(name in getattr(layer, part) for part in layer.adapter_layer_names)
