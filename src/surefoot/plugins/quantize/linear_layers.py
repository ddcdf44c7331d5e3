"""Which weights of a model are quantized: those of linear layers and of experts, except the output
head, routers of experts and gates, which are small and decide much."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel

from ...checkpoint.sources.source import Shape
from ...errors import ModelError
from ...model import FullWeights
from ...model.fused_parameters import FusedPlacement, places
from ...model.pretrained.weights import names_in_files

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
        """The same as a set."""
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
    convolutions = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv1d)}
    parameters = model.named_parameters()
    fused = [name for name, p in parameters if p.ndim == 3 and id(p) not in convolutions]
    try:
        found = places(model) if fused else {}
    except ModelError:  # transformers does more than to join them
        found = {}
    split = {at.fused for at in found.values() if at.fused in fused}
    if odd := [name for name in fused if name not in split]:
        raise ModelError(
            f"{where}: {odd[0]} contains the weights of several experts, which compressed-tensors "
            "cannot have as one tensor; use --to gguf"
        )
    if missing := sorted(name for name in found if name not in stored):
        raise ModelError(
            f"{where}: has no {missing[0]}; the weights of several experts are one tensor in its "
            "files, which compressed-tensors cannot have; use --to gguf"
        )
    return found
