"""The configuration of a model, checked, with the positions and the loss of routers of a recipe.

The positions that a model has, and more of them by rescaled rotary embeddings.

A model that is extended says so in its ``config.json``. An adapter has none of its own, so one
that was trained on an extended base gets one, with the positions of that base.

The loss that balances the experts of a mixture, as transformers computes it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from ...errors import ModelError
from ...storage.files import read_json
from ..section import ModelSection

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")  # in a configuration
_SWITCH = "output_router_logits"  # in a configuration, and an argument of a model
_KEY = "model.router_aux_loss_coef"


def add_router_loss(config: PretrainedConfig, coefficient: float, folder: Path) -> None:
    """Let models of ``config`` compute the loss, weighted by ``coefficient``. Raises ``ModelError``
    if ``config`` has no setting for it."""
    text = config.get_text_config(decoder=True)
    names = [name for name in COEFFICIENTS if hasattr(text, name)]
    if not names or not hasattr(text, _SWITCH):
        raise ModelError(
            f"{_KEY}: {folder} has no loss of routers (model type {text.model_type}); remove it"
        )
    setattr(text, names[0], coefficient)
    setattr(text, _SWITCH, True)


def check_router_loss(model: PreTrainedModel) -> None:
    """Raise ``ModelError`` unless ``model`` computes the loss: some configurations have settings
    that no code reads."""
    if _SWITCH not in inspect.signature(type(model).forward).parameters:
        raise ModelError(
            f"{_KEY}: {type(model).__name__} computes no loss of its routers; remove it"
        )


CONFIG = "config.json"
# Waves as long as a quarter to all of the former context are partly rescaled, as in Llama
# 3.1 (arXiv:2407.21783, and the ``config.json`` of its models).
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_CODE = (
    "it comes with Python code of its own; if you trust that, set model.trust_remote_code=true "
    "(chat and export: --trust-remote-code)"
)
_NO_CONFIG = (ValueError, OSError, ImportError, KeyError, TypeError, AttributeError, RecursionError)
_SIZES = ["hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers"]
_SIZES += ["num_attention_heads", "num_key_value_heads", "head_dim"]
# The most that a size, and a number of layers, is believed to be: known models have 2^18 tokens and
# 130 layers. With 10^9 layers, transformers makes lists of them until the memory is full.
_MOST, _MOST_LAYERS = 1 << 24, 1 << 12
_LAYERS = re.compile(r"layers?$|^depth$")
POSITIONS, ROPE = "max_position_embeddings", "rope_parameters"
_SCALED = ("gpt_oss", "apertus")  # whose default in transformers 4 is rescaled
_OLD_LAYERS = {"linear_attention": "mamba", "full_attention": "attention"}
_RENAMED_LAYERS = {"granitemoehybrid": "layer_types", "zamba2": "layers_block_type"}
_ORIGINAL = "original_max_position_embeddings"


class UnreadableConfigError(ModelError):
    """transformers makes no configuration of a ``config.json``."""


def read_config(folder: Path, section: ModelSection) -> PretrainedConfig:
    """The configuration of the model in ``folder``, with the positions and the loss of routers of
    ``section``. Raises ``ModelError`` if it cannot be read, a value is of a wrong type, it needs
    code that is not trusted, its positions cannot be extended, or it has no such loss."""
    _check_layers(folder)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=section.trust_remote_code)
    except StrictDataclassError as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{folder / CONFIG}: {reason}; fetch the model again") from None
    except _NO_CONFIG as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        if "trust_remote_code=True" in str(error):
            said = [_CODE]
        raise UnreadableConfigError(
            f"{Path(folder) / CONFIG}: cannot load the model: {said[0]}"
        ) from None
    for part in (config, config.get_text_config(decoder=True)):
        for name in _SIZES:
            if isinstance(size := getattr(part, name, None), int) and not 0 <= size <= _MOST:
                raise _no_size(folder, name, size, _MOST)
    if section.max_positions is not None:
        _extend(config, section, folder)
    if section.router_aux_loss_coef is not None:
        add_router_loss(config, section.router_aux_loss_coef, folder)
    return config


def _check_layers(folder: Path) -> None:
    """Raise ``ModelError`` if there are too many layers, before anything is made for each."""
    try:
        parts = [read_json(folder / CONFIG)]
    except (OSError, ValueError):
        return  # which transformers says
    while parts:
        part = parts.pop()
        for name, size in part.items() if isinstance(part, dict) else ():
            parts.append(size)
            if _LAYERS.search(name) and isinstance(size, int) and size > _MOST_LAYERS:
                raise _no_size(folder, name, size, _MOST_LAYERS)


def _no_size(folder: Path, name: str, size: int, most: int) -> ModelError:
    expected = "" if size < 0 else f"; expected at most {most:,}"
    return ModelError(f"{folder / CONFIG}: {name} is {size:,}{expected}; fetch the model again")


def num_positions(config: PretrainedConfig) -> int | None:
    """The longest text that the model has positions for; None if it has no limit."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "alibi", False):  # distances alone, without an end
        return None
    found = getattr(text, POSITIONS, None)
    return found if isinstance(found, int) and found > 0 else None


def positions_key(config: PretrainedConfig) -> str:
    """The key of ``config.json`` for the positions, which not all architectures name alike."""
    return str(config.get_text_config(decoder=True).attribute_map.get(POSITIONS, POSITIONS))


def why_not_extended(config: PretrainedConfig) -> str | None:
    """Why the positions of a model cannot be extended; None if they can."""
    rope = getattr(config, ROPE, None)
    if not isinstance(rope, dict) or "rope_theta" not in rope or num_positions(config) is None:
        return f"its {CONFIG} has no rotary embeddings that are the same in all layers"
    if rope.get("rope_type", "default") != "default":
        return f"its {CONFIG} rescales them already (rope_type {rope['rope_type']})"
    return None


def _extend(config: PretrainedConfig, section: ModelSection, folder: Path) -> None:
    """Rescale the rotary embeddings of ``config``. Nothing is done where it has the positions."""
    wanted, own = section.max_positions, num_positions(config)
    if wanted is None or wanted == own:
        return
    if reason := why_not_extended(config):
        raise ModelError(f"model.max_positions: {folder} cannot be extended: {reason}; remove it")
    assert own is not None
    if wanted < own:
        raise ModelError(
            f"model.max_positions: {wanted:,} is less than the {own:,} positions that {folder} "
            "has; for shorter examples, set data.cutoff_len"
        )
    scaled = {**config.rope_parameters, "rope_type": section.rope_scaling, "factor": wanted / own}
    if section.rope_scaling != "linear":
        scaled["original_max_position_embeddings"] = own
    if section.rope_scaling == "llama3":
        scaled |= _LLAMA3
    config.max_position_embeddings, config.rope_parameters = wanted, scaled


def changed_config(folder: Path, section: ModelSection) -> dict[str, object]:
    """What ``section`` changes in the ``config.json`` of the model in ``folder``."""
    if section.max_positions is None:
        return {}
    config = read_config(folder, section)
    rope = config.rope_parameters
    old = old_rope(rope, config.model_type)
    return {POSITIONS: config.max_position_embeddings, ROPE: rope, **old}


def with_old_rope(config: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """``stored``, what a ``config.json`` is to say, with the rotary embeddings of ``config`` also
    as transformers 4 reads them: alone, ``rope_parameters`` are nothing to it, and the model
    computes with the defaults. Newer versions read both, which say the same."""
    rope = old_rope(config.get(ROPE), str(config.get("model_type")))
    found = {**stored, **rope, **old_layers(stored)}
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and isinstance(stored.get("text_config"), Mapping):
        found["text_config"] = with_old_rope(inner, stored["text_config"])
    return found


def old_layers(stored: Mapping[str, Any]) -> dict[str, object]:
    """The kinds of layers as transformers 4 calls them, where ``stored`` has those of 5, which
    reads both; 4 opens no model with the new ones."""
    key = _RENAMED_LAYERS.get(str(stored.get("model_type")), "")
    kinds = stored.get(key)
    return {key: [_OLD_LAYERS.get(k, k) for k in kinds]} if isinstance(kinds, list) else {}


def old_rope(rope: object, model_type: str) -> dict[str, object]:
    """The keys of transformers 4 for ``rope_parameters``; none for models that it does not have."""
    if not isinstance(rope, Mapping):
        return {}
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)  # one for each type of layer
    if not isinstance(rope, Mapping) or "rope_theta" not in rope:
        return {}
    old = {"rope_theta": rope["rope_theta"]}
    if isinstance(local, Mapping):
        old["rope_local_base_freq"] = local.get("rope_theta")
    if (part := rope.get("partial_rotary_factor")) is not None:
        old["partial_rotary_factor"] = part
    if model_type.startswith("gpt_neox"):
        old |= {"rotary_emb_base": rope["rope_theta"], "rotary_pct": part}
    if model_type.startswith("modernbert") and isinstance(local, Mapping):
        old |= {"global_rope_theta": rope["rope_theta"], "local_rope_theta": local["rope_theta"]}
    scaling = {key: rope[key] for key in rope if key not in ("rope_theta", "partial_rotary_factor")}
    if model_type.startswith("phi3") and scaling.get("rope_type") == "longrope":  # these alone
        old |= {key: scaling[key] for key in (_ORIGINAL,) if key in scaling}
        scaling = {"type": "longrope", **{k: scaling[k] for k in scaling if k.endswith("_factor")}}
    is_plain = scaling.keys() <= {"rope_type", "type"} and scaling.get("rope_type") == "default"
    if is_plain and model_type not in _SCALED:
        return old
    return {**old, "rope_scaling": None if is_plain else scaling}


def extension_of(adapter: Path) -> dict[str, Any]:
    """The settings of the base on which an adapter was trained, if it was extended."""
    try:
        config = read_json(adapter / CONFIG)
        return {
            "max_positions": int(config[POSITIONS]),
            "rope_scaling": str(config[ROPE]["rope_type"]),
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{adapter / CONFIG}: does not say how the base was extended: {error}"
        ) from None


def check_adapter(section: ModelSection) -> None:
    """Raise ``ModelError`` if an adapter was trained on a base with other positions."""
    named = [("adapter", section.adapter)] if section.adapter else []
    for key, folder in (*named, *(("frozen_adapters", one) for one in section.frozen_adapters)):
        found = extension_of(folder)
        if any(getattr(section, name) != value for name, value in found.items()):
            settings = " ".join(f"model.{name}={value}" for name, value in found.items())
            raise ModelError(
                f"model.{key}: {folder} was trained on an extended base; set {settings}"
            )
