"""Insert decoder layers that return their input until they are trained (LLaMA Pro,
arXiv:2401.02415).

A new layer is a copy of the layer before it. The last projection of each branch (attention, MLP,
experts) is zero, so the branches add nothing to the hidden states. The configuration counts the new
layers, and is proven to describe the model: it must build the same layers again.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ...errors import RecipeError, counted
from ..targets import layer_list

KEY = "method.llama_pro"
# Linear layers and fused experts whose result is added to the hidden states.
_LAST = frozenset(
    {
        *("o_proj", "out_proj", "output_proj", "dense", "wo", "linear_out"),
        *("down_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "w2", "linear_fc2"),
        *("output_linear", "linear_2"),
    }
)
_NUMBERS = ("layer_idx", "layer_id", "layer_number", "layer_index")  # of a layer in its modules
_RECORD = "llama_pro_layers"  # in a configuration: the numbers of the new layers
_IS_NEW, _NUMBERED = "_surefoot_is_new", "_surefoot_numbers"  # attributes of layers


def insert_layers(model: PreTrainedModel, count: int) -> list[nn.Module]:
    """Insert ``count`` layers into ``model``, evenly spaced, the last one at the end. Returns them,
    or the ones that an earlier run has inserted. Raises ``RecipeError`` if the model has fewer
    layers or other new ones, or its architecture does not allow it."""
    layers, config = layer_list(model), model.config.get_text_config(decoder=True)
    number = len(layers)
    if (known := getattr(config, _RECORD, None)) is not None:
        return _recorded(layers, known, count)
    if count > number:
        raise RecipeError(
            f"{KEY}.num_new_layers: expected at most {number}, the layers of the model, got {count}"
        )
    if getattr(config, "num_hidden_layers", None) != number:
        raise _refusal(model, f"its configuration does not count its {number} layers")
    sources = [(index + 1) * number // count - 1 for index in range(count)]
    order = sorted([*range(number), *sources])  # of each layer, the layer that it is or copies
    for source in reversed(sources):
        layers.insert(source + 1, _identity(model, layers[source]))
    changed = _count_layers(config, number, order)
    _tell_modules(model, changed)
    for place, (layer, before) in enumerate(zip(layers, order, strict=True)):
        vars(layer)[_NUMBERED] = before, place
        set_number(layer, place)
    _check_config(model)
    places = [place for place, layer in enumerate(layers) if is_new(layer)]
    vars(config)[_RECORD] = places
    return [layers[place] for place in places]


def _recorded(layers: nn.ModuleList, known: object, count: int) -> list[nn.Module]:
    """The layers that the configuration of the model says are new."""
    listed = known if isinstance(known, list) else [known]
    numbers = [place for place in listed if type(place) is int and 0 <= place < len(layers)]
    if len(numbers) < len(listed):
        raise RecipeError(
            f"{KEY}: {_RECORD} in the config.json of the model is {known}, which are no layers of "
            "it; remove the key to insert new ones"
        )
    if len(numbers) != count:
        raise RecipeError(
            f"{KEY}.num_new_layers: got {count}, but the model has "
            f"{counted(len(numbers), 'layer')} of an earlier run ({_RECORD} in its config.json); "
            f"set it to {len(numbers)} to train these"
        )
    return [layers[place] for place in numbers]


def new_layers_of(model: PreTrainedModel) -> Sequence[int]:
    """The numbers of the layers that were inserted into ``model``, by its configuration."""
    found: Sequence[int] = getattr(model.config.get_text_config(decoder=True), _RECORD, ())
    return found


def is_new(layer: nn.Module) -> bool:
    """Whether ``insert_layers`` has added ``layer``."""
    return bool(vars(layer).get(_IS_NEW))


def numbers(layer: nn.Module) -> tuple[int, int] | None:
    """The number that ``layer`` (or the one that it copies) had before layers were inserted, and
    its own now; None if none were inserted."""
    return vars(layer).get(_NUMBERED)


def set_number(layer: nn.Module, number: int) -> None:
    """Tell the modules of ``layer`` its place, which is that of its keys and values in a cache."""
    for module in layer.modules():
        for name in _NUMBERS:
            if type(vars(module).get(name)) is int:
                setattr(module, name, number)


@torch.no_grad()
def _identity(model: PreTrainedModel, source: nn.Module) -> nn.Module:
    """A copy of the layer ``source`` that returns its input."""
    shared = (model.config, *vars(model.config).values())
    layer = copy.deepcopy(source, {id(one): one for one in shared})
    for tensor, known in zip(
        layer.state_dict().values(), source.state_dict().values(), strict=True
    ):
        if tensor.is_meta:  # notes whose values it will have
            tensor.copy_(known)
    last = [p for name, p in layer.named_parameters() if _is_last(name)]
    if not last:
        kinds = sorted({name.split(".")[-2] for name, _ in layer.named_parameters() if "." in name})
        raise _refusal(model, f"no output projection is known among {', '.join(kinds)}")
    for parameter in last:
        parameter.zero_()
    vars(layer)[_IS_NEW] = True
    return layer


def _is_last(name: str) -> bool:
    """Whether a parameter belongs to the last projection of a branch: of a linear layer, or of
    experts that are fused in a parameter of that name."""
    parts = name.split(".")
    own = parts[-2] if parts[-1] in ("weight", "bias") and len(parts) > 1 else parts[-1]
    return own.removesuffix("_bias") in _LAST


def _count_layers(
    config: PretrainedConfig, number: int, order: Sequence[int]
) -> Mapping[str, tuple[object, object]]:
    """Change the number of layers, and the lists that have a value for each layer; these before and
    after, by name."""
    changed: dict[str, tuple[object, object]] = {}
    for name, value in list(vars(config).items()):
        is_by_layer = "layer" in name or "block" in name
        if is_by_layer and isinstance(value, list | tuple) and len(value) == number:
            vars(config)[name] = type(value)(value[source] for source in order)
            changed[name] = value, vars(config)[name]
    config.num_hidden_layers = len(order)
    return changed


def _tell_modules(model: nn.Module, changed: Mapping[str, tuple[object, object]]) -> None:
    """Change the copies of these lists that modules keep, as GPT-Neo's do."""
    for module in model.modules():
        for name, (before, after) in changed.items():
            if vars(module).get(name) == before:
                setattr(module, name, after)


def _check_config(model: PreTrainedModel) -> None:
    """Raise ``RecipeError`` unless the configuration, as it is saved, builds the same layers."""
    kind: Any = type(model)
    try:
        with tempfile.TemporaryDirectory() as folder:
            model.config.save_pretrained(folder)
            saved = type(model.config).from_pretrained(folder)
        with torch.device("meta"):
            again: PreTrainedModel = kind(saved)
        expected = [_facts(layer) for layer in layer_list(again)]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _refusal(model, f"its configuration allows no more layers: {reason}") from None
    for number, (layer, wanted) in enumerate(zip(layer_list(model), expected, strict=True)):
        found = _facts(layer)
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                raise _refusal(
                    model,
                    f"its configuration cannot describe them: {name} of layer {number} is "
                    f"{found.get(name)}, but would be {wanted.get(name)} when it is loaded",
                )


def _facts(layer: nn.Module) -> Mapping[str, object]:
    """What a configuration decides about a layer: shapes, classes and plain settings."""
    found: dict[str, object] = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    plain = (int, float, str, bool, list, tuple, type(None))
    for name, module in layer.named_modules():
        found[name or "the class"] = type(module).__name__
        for setting, value in vars(module).items():
            if not setting.startswith("_") and setting != "training" and isinstance(value, plain):
                listed = [*value] if isinstance(value, list | tuple) else value  # as in a file
                found[f"{name}.{setting}".removeprefix(".")] = listed
    return found


def _refusal(model: PreTrainedModel, reason: str) -> RecipeError:
    return RecipeError(
        f"{KEY}: {type(model).__name__} gets no new layers: {reason}; use another method, such as "
        "freeze"
    )
