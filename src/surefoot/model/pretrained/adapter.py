"""A PEFT adapter on a loaded model: checked against the model before any weight is read."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from ...errors import ModelError, counted
from .weights import AdapterWeights

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# What PEFT raises for values of a wrong type, and for an adapter that does not fit.
_OF_VALUES = (TypeError, AttributeError, IndexError, ArithmeticError, AssertionError, ImportError)
_OF_FIT = (RuntimeError, ValueError, KeyError)


def attach(model: PreTrainedModel, folder: Path, *, trainable: bool = False) -> nn.Module:
    """``model`` wrapped by PEFT with the adapter in ``folder``. Raises ``ModelError``: no adapter
    there, a damaged one, or one that was made for another model."""
    from peft import PeftModel

    check(folder)
    config = _config_of(folder)
    try:
        with _fitting(folder, model):
            wrapped: nn.Module = PeftModel.from_pretrained(
                model, str(folder), is_trainable=trainable, config=config
            )
    except SafetensorError as error:
        raise ModelError(f"{folder}: damaged or truncated {WEIGHTS}: {error}") from None
    _check_names(wrapped, folder, model.name_or_path)
    return wrapped


def attach_empty(model: PreTrainedModel, folder: Path) -> nn.Module:
    """``model`` wrapped by an adapter like the one in ``folder``, whose values are not read."""
    from peft import get_peft_model

    _check_config(folder)
    config = _config_of(folder)
    config.inference_mode = config.init_lora_weights = False
    with _fitting(folder, model):
        wrapped: nn.Module = get_peft_model(model, config)
    return wrapped


def _config_of(folder: Path) -> Any:
    """PEFT's configuration of an adapter. Raises ``ModelError``: PEFT makes none of the file."""
    from peft import PeftConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of keys of newer versions
        try:
            found = PeftConfig.from_pretrained(str(folder))
            _check_tokens(getattr(found, "trainable_token_indices", None))
        except (*_OF_VALUES, *_OF_FIT) as error:
            raise ModelError(_unusable(folder, error)) from None
    return found


def _check_tokens(found: object) -> None:
    """Raise ``TypeError`` if the trained tokens are not what PEFT takes them for, unchecked."""
    lists = found.values() if isinstance(found, dict) else [found or []]
    if not all(isinstance(one, list) and all(type(i) is int for i in one) for one in lists):
        raise TypeError(f"trainable_token_indices is {found}, expected lists of token ids")


@contextmanager
def _fitting(folder: Path, model: PreTrainedModel) -> Iterator[None]:
    """A block in which PEFT puts the adapter in ``folder`` on ``model``. Raises ``ModelError``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what matters of them is checked afterwards
            yield
    except _OF_VALUES as error:
        raise ModelError(_unusable(folder, error)) from None
    except _OF_FIT as error:
        lines = _lines(error)
        detail = next((line for line in lines if "mismatch" in line or "not found" in line), None)
        raise ModelError(
            f"{folder}: this is an adapter of another model, not of {model.name_or_path}: "
            f"{detail or lines[0]}"
        ) from None


def _unusable(folder: Path, error: Exception) -> str:
    return f"{folder / CONFIG}: PEFT cannot use its values: {_lines(error)[0]}"


def _lines(error: Exception) -> list[str]:
    found = [line.strip() for line in str(error).splitlines() if line.strip()]
    return found or [type(error).__name__]


def _check_names(wrapped: nn.Module, folder: Path, base: str) -> None:
    """Reject an adapter whose tensors PEFT would silently skip, or leave random."""
    with safe_open(folder / WEIGHTS, "pt") as file:
        found = set(file.keys())
    wanted = AdapterWeights(wrapped).state_dict().keys()
    missing = sorted(wanted - found)
    unexpected = sorted(found - wanted - wrapped.state_dict().keys())
    if missing or unexpected:
        do = "does" if len(unexpected) == 1 else "do"
        raise ModelError(
            f"{folder}: this is an adapter of another model, not of {base}: {len(unexpected)} "
            f"of its {counted(len(found), 'tensor')} {do} not exist in the model and "
            f"{counted(len(missing), 'is', 'are')} missing (for example "
            f"{(unexpected or missing)[0]})"
        )


def _check_config(folder: Path) -> None:
    if not (folder / "adapter_config.json").is_file():
        inside = sorted(path.parent.name for path in folder.glob("*/adapter_config.json"))
        of = f"; it contains several ({', '.join(inside)}): name one" if inside else ""
        raise ModelError(
            f"{folder}: no adapter_config.json; expected the local folder of a PEFT adapter{of}"
        )
    try:
        found = json.loads((folder / CONFIG).read_bytes())
    except ValueError as error:
        raise ModelError(f"{folder / CONFIG}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{folder / CONFIG}: expected a JSON object")


def check(folder: Path) -> None:
    """Raise ``ModelError`` if the files of an adapter are not in ``folder``."""
    _check_config(folder)
    if not (folder / WEIGHTS).is_file():
        found = "; it contains a pickle, which is never read" if any(folder.glob("*.bin")) else ""
        raise ModelError(f"{folder}: no {WEIGHTS}{found}")
