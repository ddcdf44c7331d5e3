"""A PEFT adapter on a loaded model: checked against the model before any weight is read."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from ...errors import ModelError, counted
from .weights import AdapterWeights

WEIGHTS = "adapter_model.safetensors"


def attach(model: PreTrainedModel, folder: Path, *, trainable: bool = False) -> nn.Module:
    """``model`` wrapped by PEFT with the adapter in ``folder``. Raises ``ModelError``: no adapter
    there, a damaged one, or one that was made for another model."""
    from peft import PeftModel

    check(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what matters of them is checked below
            wrapped: nn.Module = PeftModel.from_pretrained(
                model, str(folder), is_trainable=trainable
            )
    except (RuntimeError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()
        detail = next(
            (line.strip() for line in reason if "mismatch" in line or "not found" in line),
            reason[0],
        )
        raise ModelError(
            f"{folder}: this is an adapter of another model, not of {model.name_or_path}: {detail}"
        ) from None
    except SafetensorError as error:
        raise ModelError(f"{folder}: damaged or truncated {WEIGHTS}: {error}") from None
    _check_names(wrapped, folder, model.name_or_path)
    return wrapped


def attach_empty(model: PreTrainedModel, folder: Path) -> nn.Module:
    """``model`` wrapped by an adapter like the one in ``folder``, whose values are not read."""
    from peft import PeftConfig, get_peft_model

    _check_config(folder)
    config = PeftConfig.from_pretrained(str(folder))
    config.inference_mode = config.init_lora_weights = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say was said when the adapter was made
        wrapped: nn.Module = get_peft_model(model, config)
    return wrapped


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
        json.loads((folder / "adapter_config.json").read_bytes())
    except ValueError as error:
        raise ModelError(f"{folder}/adapter_config.json: not JSON: {error}") from None


def check(folder: Path) -> None:
    """Raise ``ModelError`` if the files of an adapter are not in ``folder``."""
    _check_config(folder)
    if not (folder / WEIGHTS).is_file():
        found = "; it contains a pickle, which is never read" if any(folder.glob("*.bin")) else ""
        raise ModelError(f"{folder}: no {WEIGHTS}{found}")
