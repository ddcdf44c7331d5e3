"""The configuration of a model, checked, with the positions and the loss of routers of a recipe,
and how its weights are quantized.

A model whose positions are extended, by rescaled rotary embeddings, says so in its ``config.json``.
An adapter has none of its own, so one that was trained on an extended base gets one, with the
positions of that base.

A frozen base in 4 or 8 bits (QLoRA, arXiv:2305.14314), through bitsandbytes, takes a fraction of
the memory, while an adapter is trained in full precision. Only the copy in memory is quantized,
each time from the same files to the same bits. Checkpoints contain the adapter, and a merge uses
the base from its files.

Files may contain quantized weights. Those that transformers dequantizes without a kernel of its
own, and the ``FORMS`` that are dequantized here, are read in full precision, and trained through an
adapter. All others are refused by name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
    PretrainedConfig,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..errors import ModelError, RecipeError, first_line, installation
from ..storage.files import read_json
from ._quantization import FORMS, Form
from .routers import add_router_loss
from .section import ModelSection

CONFIG = "config.json"
# Waves as long as a quarter to all of the former context are partly rescaled, as in Llama
# 3.1 (arXiv:2407.21783, and the ``config.json`` of its models).
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_CODE = (
    "it comes with Python code of its own; if you trust that, set model.trust_remote_code=true "
    "(chat and export: --trust-remote-code)"
)
# What transformers raises for a configuration that describes no model, while it reads it or makes
# the model; and what it raises, too, for a right one that cannot be made on the meta device.
NO_MODEL = (ValueError, TypeError, KeyError, ArithmeticError, AssertionError, OSError, ImportError)
NO_MODEL_AT_ALL = (*NO_MODEL, AttributeError, IndexError, RuntimeError)
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


def auto_class(config: PretrainedConfig) -> Any:
    """The class of transformers that opens models of ``config``: the one for causal language
    models, or where they have none, or only one for a part of it (Qwen3.5), the one for models that
    read pictures, too."""
    classes = (AutoModelForCausalLM, AutoModelForImageTextToText)
    known = [each for each in classes if type(config) in each._model_mapping]
    whole = (e for e in known if e._model_mapping[type(config)].config_class is type(config))
    # the last says what it does not know
    return next(whole, known[0] if known else AutoModelForCausalLM)


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
    except NO_MODEL_AT_ALL as error:
        is_code = "trust_remote_code=True" in str(error)
        reason = _CODE if is_code else why_no_model(error, Path(folder))
        raise UnreadableConfigError(
            f"{Path(folder) / CONFIG}: cannot load the model: {reason}"
        ) from None
    for part in (config, config.get_text_config(decoder=True)):
        for name in _SIZES:
            if isinstance(size := size_of(part, name), int) and not 0 <= size <= _MOST:
                raise _no_size(folder, name, size, _MOST)
    if section.max_positions is not None:
        _extend(config, section, folder)
    if section.router_aux_loss_coef is not None:
        add_router_loss(config, section.router_aux_loss_coef, folder)
    return config


def why_no_model(error: Exception, folder: Path) -> str:
    """The reason that transformers gives, with the sizes that are zero, which a division by one of
    them does not name."""
    stored = read_json(folder / CONFIG) if isinstance(error, ZeroDivisionError) else {}
    sizes = stored | (stored.get("text_config") or {})
    zeros = [f"; {name} is 0" for name in _SIZES if sizes.get(name) == 0]
    return first_line(error) + "".join(zeros)


def size_of(config: PretrainedConfig, name: str) -> object:
    """A size in a configuration; None if it has none, or another one for some layers, as the heads
    of Gemma 4: transformers raises an error then."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


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
    positions = getattr(text, POSITIONS, None)
    return positions if isinstance(positions, int) and positions > 0 else None


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
    max_positions, positions = section.max_positions, num_positions(config)
    if max_positions is None or max_positions == positions:
        return
    if reason := why_not_extended(config):
        raise ModelError(f"model.max_positions: {folder} cannot be extended: {reason}; remove it")
    assert positions is not None
    if max_positions < positions:
        raise ModelError(
            f"model.max_positions: {max_positions:,} is less than the {positions:,} positions that "
            f"{folder} has; for shorter examples, set data.cutoff_len"
        )
    factor = max_positions / positions
    scaled = {**config.rope_parameters, "rope_type": section.rope_scaling, "factor": factor}
    if section.rope_scaling != "linear":
        scaled["original_max_position_embeddings"] = positions
    if section.rope_scaling == "llama3":
        scaled |= _LLAMA3
    config.max_position_embeddings, config.rope_parameters = max_positions, scaled


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
    content = {**stored, **rope, **old_layers(stored)}
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and isinstance(stored.get("text_config"), Mapping):
        content["text_config"] = with_old_rope(inner, stored["text_config"])
    return content


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
    adapters = [("adapter", section.adapter)] if section.adapter else []
    adapters += [("frozen_adapters", path) for path in section.frozen_adapters]
    for key, folder in adapters:
        extension = extension_of(folder)
        if any(getattr(section, name) != value for name, value in extension.items()):
            settings = " ".join(f"model.{name}={value}" for name, value in extension.items())
            raise ModelError(
                f"model.{key}: {folder} was trained on an extended base; set {settings}"
            )


_ADVICE = (
    "Take the model that they were made from, with model.quantization_bit: 4 if memory is short"
)
# What dequantizes the weights in transformers, by the name in ``config.json``.
DEQUANTIZED = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}


def quantization_of(config: PretrainedConfig) -> str | None:
    """How the weights of a model are quantized in its files: ``quant_method`` of a configuration;
    None if they are not."""
    if not (settings := _settings(config)):
        return None
    method = settings.get("quant_method", "an unnamed form")
    return str(getattr(method, "value", method))


def dequantization(
    config: PretrainedConfig, section: ModelSection, folder: Path
) -> QuantizationConfigMixin | None:
    """What makes transformers read quantized weights in full precision; None if they are not
    quantized, or dequantized before. Raises ``ModelError`` for a form that is not read."""
    method = quantization_of(config)
    if method is None:
        return None
    if method not in DEQUANTIZED and form_of(config, folder) is None:
        *most, last = [*FORMS, *DEQUANTIZED]
        raise ModelError(
            f"model.path: the weights in {folder} are quantized ({method}), which is not read; "
            f"{', '.join(most)} and {last} are. {_ADVICE}"
        )
    if section.quantization_bit is not None:
        raise ModelError(
            f"model.quantization_bit: the weights in {folder} are quantized already ({method}); "
            "leave it unset, and they are read in full precision"
        )
    return DEQUANTIZED[method](dequantize=True) if method in DEQUANTIZED else None


def is_dequantized_here(method: object) -> bool:
    """Whether weights of the form ``method`` are computed here as what they mean."""
    return method in FORMS


def form_of(config: PretrainedConfig, folder: Path) -> Form | None:
    """The form of quantized weights that are dequantized here; None for all others. Raises
    ``ModelError`` for settings that are not read."""
    method = quantization_of(config)
    if method is None or method not in FORMS:
        return None
    try:
        return FORMS[method].of(_settings(config))
    except ModelError as error:
        raise ModelError(
            f"model.path: the weights in {folder} are quantized ({method}) in a way that is not "
            f"read: {error}. {_ADVICE}"
        ) from None


def as_dequantized(config: PretrainedConfig) -> PretrainedConfig:
    """``config`` as it was before its weights got one of the ``FORMS``."""
    if quantization_of(config) in FORMS:
        del config.quantization_config
    return config


def refuse_own_weights(config: PretrainedConfig, folder: Path) -> None:
    """Raise ``RecipeError`` if a method would train, and save, weights that are quantized."""
    if (method := quantization_of(config)) is not None:
        raise RecipeError(
            f"model.path: the weights in {folder} are quantized ({method}); use method: lora, or "
            "take the model that they were made from"
        )


def refuse_uneven_blocks(
    config: PretrainedConfig, shapes: Mapping[str, Sequence[int]], folder: Path
) -> None:
    """Raise ``ModelError`` if the blocks of an fp8 matrix, which share a scale, are not all of one
    size. transformers derives the size from the number of scales, and would take wrong ones."""
    for name, count in shapes.items():
        weight = shapes.get(name.removesuffix("_scale_inv"), ())
        if not name.endswith("_scale_inv") or len(weight) < 2 or len(count) < 2:
            continue
        block_size = _settings(config).get("weight_block_size") or weight[-2:]
        along = zip(weight[-2:], count[-2:], block_size, strict=True)
        if any(blocks > 1 and size % block for size, blocks, block in along):
            raise ModelError(
                f"model.path: {name.removesuffix('_scale_inv')} in {folder} has the shape "
                f"{list(weight)}, which fp8 blocks of {block_size[0]} x {block_size[1]} do not "
                "divide: transformers would read it wrongly. Take the model that it was made from"
            )


def _settings(config: PretrainedConfig) -> Mapping[str, Any]:
    """The settings of a model's quantization; empty without one."""
    settings = getattr(config, "quantization_config", None) or {}
    return settings if isinstance(settings, Mapping) else vars(settings)


def quantization(section: ModelSection) -> BitsAndBytesConfig | None:
    """The quantization settings for transformers; None without quantization. Raises ``ModelError``:
    bitsandbytes is not installed."""
    if section.quantization_bit is None:
        return None
    if find_spec("bitsandbytes") is None:
        raise ModelError(
            f"model.quantization_bit: {section.quantization_bit} needs bitsandbytes, which is not "
            f"installed: {installation('bitsandbytes')}"
        )
    if section.quantization_bit == 8:
        # it would say at every product that it casts what comes in
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        return BitsAndBytesConfig(load_in_8bit=True)
    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=section.quantization_type,
        bnb_4bit_use_double_quant=section.double_quantization,
        bnb_4bit_compute_dtype=torch.bfloat16 if has_bf16 else torch.float32,
    )


def check_alone(section: ModelSection, num_processes: int) -> None:
    """Raise ``RecipeError`` if several ranks would use a quantized base."""
    if section.quantization_bit is not None and num_processes > 1:
        raise RecipeError(
            "model.quantization_bit: a quantized model can be opened on one rank only, not on "
            f"{num_processes}; start one, or leave quantization_bit unset and shard the weights"
        )


def disable_relayout(model: nn.Module) -> None:
    """Keep evaluations on a CPU from changing the layout of the base, as bitsandbytes does with
    AVX512: that rounds the scales, and a resumed run would differ."""
    for module in model.modules():
        if "support_avx512bf16_for_cpu" in vars(module):
            vars(module)["support_avx512bf16_for_cpu"] = False


def dequantized(layer: Any) -> torch.Tensor:
    """A linear layer's weight, in values. PEFT's own function also moves an 8-bit weight, which
    loses its scales if it is on a CPU."""
    from peft.utils.integrations import dequantize_bnb_weight, dequantize_module_weight

    weight: torch.Tensor = layer.weight
    if type(weight).__name__ in ("Params4bit", "Int8Params"):
        weight = dequantize_bnb_weight(weight, state=getattr(layer, "state", None))
    else:
        weight = dequantize_module_weight(layer)
    return weight.detach()


def num_elements(parameter: nn.Parameter) -> int:
    """The number of values of a parameter; several 4-bit values are in one element."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else prod(state.shape)
