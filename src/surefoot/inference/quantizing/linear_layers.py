"""Which weights of a model are quantized: those of linear layers, except the output head, routers
of experts and gates, which are small and decide much."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from ...checkpoint.sources.source import Shape
from ...errors import ModelError
from ...model import FullWeights
from ...model.pretrained.weights import names_in_files

_KEPT = re.compile(r"(^|\.)(gate|router|\w+_gate)$")
_ROUTERS = re.compile(r"Router|Gating|Gate(?![a-z])")  # classes without the type Linear


@dataclass(frozen=True)
class LinearLayers:
    """The layers of a model."""

    weights: Mapping[str, str]  # of those that are quantized: name in the files by module
    ignored: list[str]  # modules that vLLM and transformers must not expect quantized


def find_linear_layers(
    model: PreTrainedModel, stored: Mapping[str, Shape], where: str
) -> LinearLayers:
    """The layers of ``model``, whose files contain the tensors ``stored``. Raises ``ModelError`` if
    there are none, or experts that are one tensor."""
    convolutions = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv1d)}
    parameters = model.named_parameters()
    if fused := [name for name, p in parameters if p.ndim == 3 and id(p) not in convolutions]:
        raise ModelError(
            f"{where}: {fused[0]} contains the weights of several experts; models with experts "
            "cannot be quantized to compressed-tensors; use --to gguf"
        )
    names = names_in_files(model, FullWeights(model).state_dict())
    head = model.get_output_embeddings()
    weights, ignored = {}, []
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear)
        if is_linear and module is not head and not _KEPT.search(name):
            weights[name] = names.get(f"{name}.weight", f"{name}.weight")
        elif is_linear or _ROUTERS.search(type(module).__name__):
            ignored.append(name)
    if not weights or not set(weights.values()) <= stored.keys():
        missing = sorted(set(weights.values()) - stored.keys())
        raise ModelError(
            f"{where}: has no {missing[0]}, which the model needs"
            if missing
            else f"{where}: has no linear layers besides the output head; nothing to quantize"
        )
    return LinearLayers(weights, ignored)
