"""Tensors of a model's files that its class builds no modules for: layers for multi-token
prediction, the tower of a model of pictures that is opened as text. They are not trained, and an
export copies them from the base as they are."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_COMPUTED = ".inv_freq"  # which older versions of transformers stored


def unloaded(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Those of ``names``, in the files of ``model``, that belong to modules that it has not.
    Buffers of its own modules, which some files have as well, are none of them."""
    state, modules = model.state_dict(), {name for name, _ in model.named_modules()}
    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    prefix, found = model.base_model_prefix, []
    for name in sorted(names):
        # as transformers finds the place of a tensor (``convert_and_load_state_dict_in_model``)
        tries = [rename_source_key(name, renamings, converters, prefix, state)[0]]
        tries.append(rename_source_key(name, [], [], prefix, state)[0])
        if state.keys().isdisjoint(tries):
            places = [*tries, f"{prefix}.{name}"]  # files of the bare model have no prefix
            found += [name] if all(_is_beyond(place, modules) for place in places) else []
    return found


def _is_beyond(name: str, modules: Collection[str]) -> bool:
    """Whether a tensor is of a module that is none of ``modules``, nor of a part of a weight, as
    quantized ones have."""
    place = name.rpartition(".")[0]
    if place in modules or name.endswith(_COMPUTED):
        return False
    while place not in modules:
        place = place.rpartition(".")[0]
    return any(module.rpartition(".")[0] == place for module in modules if module)


def num_added_layers(config: Mapping[str, Any]) -> int:
    """The layers for multi-token prediction that a configuration states."""
    sizes = {**config, **(config.get("text_config") or {})}
    stated = (sizes[name] for name in sizes if "nextn" in name or "mtp" in name)
    return sum(int(number) for number in stated if isinstance(number, int))


def of_added_layers(names: Iterable[str], model: PreTrainedModel) -> set[str]:
    """Those of ``names`` that are of layers for multi-token prediction: transformers knows them of
    the published models only, whose number of layers is in its list. Of layers behind the last one
    none is such if the configuration states fewer of them: then it is of another model."""
    names, config = list(names), model.config
    layers = {name: int(found[1]) for name in names if (found := _LAYER.search(name))}
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    behind = {n for n, layer in layers.items() if num_layers is not None and layer >= num_layers}
    if len({layers[name] for name in behind}) > num_added_layers(config.to_dict()):
        behind = set()
    return behind | {name for name in names if name.startswith(("mtp.", "model.mtp."))}
