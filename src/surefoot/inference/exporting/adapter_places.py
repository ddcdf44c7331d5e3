"""Where the updates of an adapter go in the files of its base.

The files may have other names than the model in memory, and a tensor for each expert where the
model has one parameter. PEFT itself reports which parameter it adapts, on the meta device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ...checkpoint.layouts.adapter_merge import PREFIX, Updated
from ...checkpoint.sources.lora import ExpertSlice
from ...errors import CheckpointError, ModelError
from ...model import FullWeights
from ...model.adaptable import adapted
from ...model.fused_parameters import names_unless_split, places
from ...model.pretrained.adapter import attach_empty
from ...model.pretrained.weights import names_in_files


def updated_tensors(model: PreTrainedModel, adapter: Path) -> dict[str, Updated]:
    """The tensors that each module of the adapter in the folder ``adapter`` changes, by the names
    in the adapter's file; ``model``, on the meta device, is changed. Raises ``CheckpointError`` if
    it is of another model, or its experts are not slices of the parameters in memory."""
    names = names_in_files(model, FullWeights(model).state_dict())
    fused = {name: len(p) for name, p in model.named_parameters() if p.ndim == 3}  # experts
    try:
        slices = {} if not fused else places(model)
        names |= names_unless_split(model, fused)
        with torch.device("meta"):
            wrapped = attach_empty(model, adapter)
    except (ModelError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{adapter}: cannot be merged into its base: {error}") from None
    own = {id(module): name.removeprefix(PREFIX) for name, module in wrapped.named_modules()}
    found = {}
    for parameter, layer in adapted(wrapped).items():
        if parameter not in fused:  # a tied one has no name of its own
            found[own[id(layer)]] = Updated({names.get(parameter, parameter): None})
            continue
        parts = {n: at.start for n, at in slices.items() if at.fused == parameter}
        parts = parts or {names[parameter]: (0, 0, 0)}
        at = {name: ExpertSlice(fused[parameter], start) for name, start in parts.items()}
        found[own[id(layer)]] = _of_layer(layer, at)
    return found


def _of_layer(layer: Any, at: dict[str, ExpertSlice]) -> Updated:
    """As PEFT's layer says that it merges."""
    is_transposed = getattr(layer.get_base_layer(), "is_transposed", False)
    return Updated(dict(at), layer.scaling["default"], is_transposed)
