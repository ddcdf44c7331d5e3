"""PEFT adapters on a loaded model: checked against the model before any weight is read."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import equal, nn
from transformers import PreTrainedModel

from ..errors import CheckpointError, ModelError, counted, first_line
from ..storage.files import read_json
from ..storage.weight_files import adapter_names, is_adapter, open_weights
from .adapters import add_frozen, stacked_layers
from .lora_layers import enable_float32_lengths
from .weight_matrices import is_linear
from .weights import AdapterWeights

if TYPE_CHECKING:  # slow to import, and here only a name
    from peft import PeftConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ROWS = ".token_adapter.trainable_tokens_delta"  # of trained tokens
# What PEFT raises for values of a wrong type, and for an adapter that does not fit.
_OF_VALUES = (TypeError, AttributeError, IndexError, ArithmeticError, AssertionError, ImportError)
_OF_FIT = (RuntimeError, ValueError, KeyError)
# Starts for which PEFT subtracts a part of the base whenever it opens the adapter.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# What adds more to a layer's output than a product of two matrices.
_MORE = (
    *("use_dora", "modules_to_save", "target_parameters", "trainable_token_indices"),
    *("lora_bias", "layer_replication", "use_qalora", "alora_invocation_tokens", "megatron_config"),
)


def attach(model: PreTrainedModel, folder: Path, *, trainable: bool = False) -> nn.Module:
    """``model`` wrapped by PEFT with the adapter in ``folder``. Raises ``ModelError``: no adapter
    there, a damaged one, or one that was made for another model."""
    from peft import PeftModel

    check(folder)
    config = _config_of(folder)
    if next(model.parameters()).is_meta:  # whose values are read as they are in files
        _refuse_changed_base(folder, "model.adapter")
    with _reading(folder, model.name_or_path), _with_names_of_peft(folder) as place:
        wrapped: nn.Module = PeftModel.from_pretrained(
            model, str(place), is_trainable=trainable, config=config
        )
    _check_names(wrapped, folder, model.name_or_path)
    return wrapped


def is_addable(folder: Path) -> bool:
    """Whether the adapter in ``folder`` leaves the weights of its base as they are, so that others
    may be on the same base: low-rank matrices alone."""
    check(folder)
    config = _config_of(folder)
    is_changed = str(config_value(folder, "init_lora_weights")).lower().startswith(_CHANGED_BASE)
    more = [name for name in _MORE if name != "use_dora" and getattr(config, name, None)]
    if config.peft_type != "LORA" or config.bias != "none" or more or is_changed:
        return False
    with open_weights(folder / WEIGHTS) as file:
        return all(".lora_" in name for name in list(file.keys()))


def config_value(folder: Path, key: str) -> object:
    """A value of an adapter's configuration as it is in the file."""
    return read_json(folder / CONFIG).get(key)


def add_named(model: nn.Module, name: str, folder: Path) -> nn.Module:
    """``model`` with one more adapter, to be switched to; PEFT's wrapper. What is active may have
    changed. Raises ``ModelError``."""
    from peft import PeftModel

    base = str(getattr(model, "name_or_path", "the model"))
    check(folder)
    with _reading(folder, base), _with_names_of_peft(folder) as place:
        if isinstance(model, PreTrainedModel):
            config = _config_of(folder)
            model = PeftModel.from_pretrained(model, str(place), adapter_name=name, config=config)
        else:
            model.load_adapter(str(place), adapter_name=name)  # type: ignore[operator]
    try:
        _check_names(model, folder, base, name)
    except ModelError:
        remove_named(model, name)
        raise
    enable_float32_lengths(model)
    return model.eval()


def remove_named(model: nn.Module, name: str) -> nn.Module:
    """PEFT's ``model`` without an adapter; the plain one, if it has no other."""
    peft: Any = model
    others = [other for other in peft.peft_config if other != name]
    if not others:
        plain: nn.Module = peft.unload()
        return plain
    # Of an active one PEFT 0.21 warns in the middle of a deletion. Where warnings are errors, it
    # ends there, and each later switch fails with a KeyError of the name that is gone.
    if name in peft.base_model.active_adapters:
        peft.base_model.set_adapter(others[0], inference_mode=True)
    peft.delete_adapter(name)
    return model


@contextmanager
def _reading(folder: Path, base: str) -> Iterator[None]:
    """A block in which PEFT reads the adapter in ``folder`` for the model ``base``, with its errors
    in a sentence."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what matters of them is checked afterwards
            yield
    except SafetensorError as error:
        raise ModelError(f"{folder}: damaged or truncated {WEIGHTS}: {error}") from None
    except _OF_VALUES as error:
        raise ModelError(_unusable(folder, error)) from None
    except _OF_FIT as error:
        lines = (line.strip() for line in str(error).splitlines())
        detail = next((line for line in lines if "mismatch" in line or "not found" in line), None)
        what = "PEFT cannot add this adapter to"
        what = what if detail is None else "this is an adapter of another model, not of"
        raise ModelError(f"{folder}: {what} {base}: {detail or first_line(error)}") from None


def _names(folder: Path) -> dict[str, str]:
    """The names in the file of an adapter, by those that PEFT gives them."""
    with open_weights(folder / WEIGHTS) as file:
        stored = list(file.keys())
    try:
        return adapter_names(stored)
    except CheckpointError as error:
        raise ModelError(f"{folder}: {error}") from None


@contextmanager
def _with_names_of_peft(folder: Path) -> Iterator[Path]:
    """``folder``, or a temporary one with its adapter: PEFT skips tensors whose names have wrappers
    in them, and reads no names but those in a folder."""
    names = _names(folder)
    if all(new == old for new, old in names.items()):
        yield folder
        return
    with TemporaryDirectory() as temporary:
        tensors = load_file(folder / WEIGHTS)
        save_file({n: tensors[old] for n, old in names.items()}, Path(temporary, WEIGHTS))
        copy(folder / CONFIG, temporary)
        yield Path(temporary)


def _unusable(folder: Path, error: Exception) -> str:
    return f"{folder / CONFIG}: PEFT cannot use its values: {first_line(error)}"


def attach_empty(model: PreTrainedModel, folder: Path) -> nn.Module:
    """``model`` wrapped by an adapter like the one in ``folder``, whose values are not read."""
    from peft import get_peft_model

    config = _config_without_values(folder)
    with _reading(folder, model.name_or_path):
        wrapped: nn.Module = get_peft_model(model, config)
    return wrapped


def add_adapters(model: nn.Module, folders: Sequence[Path], *, is_read: bool) -> nn.Module:
    """``model``, which may have an adapter, with those in ``folders``; ``is_read``: with their
    values. Raises ``ModelError`` if one is no plain LoRA adapter of linear layers."""
    if isinstance(model, PreTrainedModel):
        first, *folders = folders
        _refuse_more(_config_without_values(first), first)
        model = attach(model, first) if is_read else attach_empty(model, first)
    for number, folder in enumerate(folders):
        _refuse_more(config := _config_without_values(folder), folder)
        _check_trained(model)
        name = f"frozen_{number}"
        base = str(getattr(model, "name_or_path", "the model"))
        if not is_read:
            with _reading(folder, base):
                add_frozen(model, name, config)
            continue
        check(folder)
        with _reading(folder, base), _with_names_of_peft(folder) as place:
            add_frozen(model, name, config)
            model.load_adapter(str(place), adapter_name=name)  # type: ignore[operator]
        _check_names(model, folder, base, name)
    for stacked in stacked_layers(model):
        if not is_linear(stacked.layer.get_base_layer()):
            raise ModelError(
                f"model.frozen_adapters: one adapts {stacked.name}, which is no linear layer; "
                "merge it into the model first with `surefoot export`"
            )
    return model


def _refuse_more(config: Any, folder: Path) -> None:
    where = f"model.frozen_adapters: {folder}"
    _refuse_changed_base(folder, "model.frozen_adapters")
    if config.peft_type != "LORA":
        raise ModelError(f"{where}: expected a LoRA adapter, found {config.peft_type}")
    more = [name for name in _MORE if getattr(config, name, None)]
    if more or config.bias != "none":
        raise ModelError(
            f"{where}: an adapter with {more[0] if more else 'bias'} is no sum with others; merge "
            "it into the model first with `surefoot export`"
        )


def _check_trained(model: nn.Module) -> None:
    config: Any = model.peft_config["default"]  # type: ignore[index]
    for name, is_on in (("dora", config.use_dora), ("targets", bool(config.target_parameters))):
        if is_on:
            why = "has magnitudes" if name == "dora" else "adapts experts as a parameter"
            raise ModelError(
                f"model.frozen_adapters: the adapter that is trained {why} (method.lora.{name}), "
                "and is no sum with others; merge them into the model first with `surefoot export`"
            )


def _refuse_changed_base(folder: Path, key: str) -> None:
    init = str(read_json(folder / CONFIG).get("init_lora_weights")).lower()
    if init.startswith(_CHANGED_BASE):
        raise ModelError(
            f"{key}: {folder}: init_lora_weights {init} changed the base at the start of training; "
            "convert the adapter with peft's path_initial_model_for_weight_conversion first"
        )


def _config_without_values(folder: Path) -> PeftConfig:
    """The configuration in ``folder``, for an adapter whose values are not initialized."""
    _check_config(folder)
    config = _config_of(folder)
    config.inference_mode = config.init_lora_weights = False
    return config


def _config_of(folder: Path) -> PeftConfig:
    """PEFT's configuration of an adapter. Raises ``ModelError``: PEFT makes none of the file."""
    from peft import PeftConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of keys of newer versions
        try:
            config = PeftConfig.from_pretrained(str(folder))
            _check_tokens(getattr(config, "trainable_token_indices", None))
        except (*_OF_VALUES, *_OF_FIT) as error:
            raise ModelError(_unusable(folder, error)) from None
    return config


def _check_tokens(indices: object) -> None:
    """Raise ``TypeError`` if the trained tokens are not what PEFT takes them for, unchecked."""
    lists = indices.values() if isinstance(indices, dict) else [[] if indices is None else indices]
    if not all(isinstance(ids, list) and all(type(i) is int for i in ids) for ids in lists):
        raise TypeError(f"trainable_token_indices is {indices}, expected lists of token ids")


def _check_names(wrapped: nn.Module, folder: Path, base: str, adapter: str = "default") -> None:
    """Reject an adapter whose tensors PEFT would silently skip, or leave random."""
    expected_names = AdapterWeights(wrapped, adapter=adapter).state_dict().keys()
    stored_names = _names_in_memory(wrapped, folder, adapter)
    stored_names -= _tied_rows(folder, expected_names)
    missing = sorted(expected_names - stored_names)
    unexpected = sorted(stored_names - expected_names - wrapped.state_dict().keys())
    if missing or unexpected:
        do = "does" if len(unexpected) == 1 else "do"
        raise ModelError(
            f"{folder}: this is an adapter of another model, not of {base}: {len(unexpected)} "
            f"of its {counted(len(stored_names), 'tensor')} {do} not exist in the model and "
            f"{counted(len(missing), 'is', 'are')} missing (for example "
            f"{(unexpected or missing)[0]})"
        )


def _names_in_memory(wrapped: nn.Module, folder: Path, adapter: str) -> set[str]:
    """The names that PEFT gives the tensors in the file: it fuses those of single experts, which
    transformers 4 had, as transformers 5 fuses the experts."""
    from peft.utils.transformers_weight_conversion import (
        convert_peft_adapter_state_dict_for_transformers,
    )

    names = _names(folder)
    with safe_open(folder / WEIGHTS, "pt") as file:
        shapes = {new: file.get_slice(old).get_shape() for new, old in names.items()}
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    config = wrapped.peft_config[adapter]  # type: ignore[index]
    return {*convert_peft_adapter_state_dict_for_transformers(wrapped, config, tensors, adapter)}


def _tied_rows(folder: Path, expected_names: Collection[str]) -> set[str]:
    """The tensors that a live state of tied embeddings has besides ``expected_names``: the
    head's copies of the rows of trained tokens."""
    names = {new: old for new, old in _names(folder).items() if new.endswith(_ROWS)}
    with open_weights(folder / WEIGHTS) as file:
        rows = {new: file.get_tensor(old) for new, old in names.items()}
    expected_rows = [rows[name] for name in rows if name in expected_names]
    others = {name: value for name, value in rows.items() if name not in expected_names}
    return {
        name for name, value in others.items() if any(equal(value, row) for row in expected_rows)
    }


def _check_config(folder: Path) -> None:
    if not is_adapter(folder):
        inside = sorted(path.parent.name for path in folder.glob("*/adapter_config.json"))
        of = f"; it contains several ({', '.join(inside)}): name one" if inside else ""
        raise ModelError(
            f"{folder}: no adapter_config.json; expected the local folder of a PEFT adapter{of}"
        )
    try:
        config = read_json(folder / CONFIG)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / CONFIG}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{folder / CONFIG}: expected a JSON object")


def check(folder: Path, *, weights: bool = True) -> None:
    """Raise ``ModelError`` if ``folder`` has no adapter that can be read; without ``weights``, its
    configuration is enough."""
    _check_config(folder)
    if weights and not (folder / WEIGHTS).is_file():
        hint = "; it contains a pickle, which is never read" if any(folder.glob("*.bin")) else ""
        raise ModelError(f"{folder}: no {WEIGHTS}{hint}")
