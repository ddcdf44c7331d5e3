"""What the linear layers of a decoder layer, and each of its experts, get as inputs.

Calls of ``F.linear`` are seen as they are made. So an expert's inputs are those of the tokens that
the router sends to it, whatever the architecture.

Legend of shapes: N tokens, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...model.pretrained.weights import place
from .layerwise import Call, run
from .linear_layers import LinearLayers

Place = tuple[int, int, int]  # of a matrix in memory; see ``place``


@dataclass(frozen=True)
class QuantizedMatrix:
    """A weight that is quantized."""

    name: str  # in the files
    weight: torch.Tensor  # [O, I] in the layer's memory
    dtype: torch.dtype  # in the files
    place: Place  # of the matrix that the layer multiplies with, of which it may be some rows
    is_expert: bool = False


@dataclass
class InputStatistics:
    """Of all inputs of a matrix."""

    gram: torch.Tensor  # [I, I], X'X
    num_tokens: int

    def add(self, other: InputStatistics) -> None:
        """More inputs."""
        self.gram = self.gram + other.gram
        self.num_tokens += other.num_tokens

    @classmethod
    def of(cls, inputs: torch.Tensor) -> InputStatistics:
        """Of inputs [..., I]."""
        inputs_NI = inputs.detach().flatten(0, -2).float()
        return cls(inputs_NI.T @ inputs_NI, len(inputs_NI))


class LinearCalls(TorchFunctionMode):
    """Calls ``seen`` with inputs and weight of every linear map, while the block lasts."""

    def __init__(self, seen: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as without it."""
        given = kwargs or {}
        if func is F.linear:
            inputs, weight = (*args, *(given[n] for n in ("input", "weight") if n in given))[:2]
            self.seen(inputs, weight)
        return func(*args, **given)


def matrices_of(
    layer: nn.Module, prefix: str, layers: LinearLayers, dtypes: Mapping[str, torch.dtype]
) -> list[QuantizedMatrix]:
    """The weights of a loaded ``layer``, whose name is ``prefix``, that are quantized. ``dtypes``
    are those in the files."""
    found = []
    for inside, module in layer.named_modules():
        if (full := f"{prefix}.{inside}") in layers.weights:
            name, weight = layers.weights[full], module.get_parameter("weight").detach()
            found.append(QuantizedMatrix(name, weight, dtypes[name], place(weight)))
    own = dict(layer.named_parameters(prefix=prefix))
    for name, at in layers.experts.items():
        if at.fused in own:
            expert, row, _ = at.start
            whole = own[at.fused].detach()[expert]
            part = whole[row : row + at.shape[0]]
            found.append(QuantizedMatrix(name, part, dtypes[name], place(whole), is_expert=True))
    return found


def statistics_of(
    layer: nn.Module,
    matrices: Sequence[QuantizedMatrix],
    hidden: Sequence[torch.Tensor],
    calls: Sequence[Call],
) -> Mapping[Place, InputStatistics]:
    """Of the inputs of all ``matrices`` of ``layer`` that get any."""
    wanted = {matrix.place for matrix in matrices}
    found: dict[Place, InputStatistics] = {}
    last: tuple[torch.Tensor, InputStatistics] | None = None

    def seen(inputs: torch.Tensor, weight: torch.Tensor) -> None:
        nonlocal last
        if (key := place(weight)) not in wanted or not inputs.numel():
            return
        if last is None or last[0] is not inputs:  # q, k and v have the same
            last = inputs, InputStatistics.of(inputs)
        if key in found:
            found[key].add(last[1])
        else:
            found[key] = InputStatistics(**vars(last[1]))

    for one, call in zip(hidden, calls, strict=True):
        with LinearCalls(seen):
            run(layer, one, call)
        last = None
    return found
