"""Check that a foreign checkpoint's weights and adapter settings fit the model of the run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...checkpoint.disk import strict_json
from ...checkpoint.layouts.adapter_merge import CHANGED_BASE
from ...checkpoint.layouts.detection import detect_layout
from ...checkpoint.layouts.opening import open_folder
from ...checkpoint.sources.source import TensorSource, read_whole
from ...checkpoint.sources.weights import ADAPTER, ADAPTER_CONFIG, MODEL
from ...errors import CheckpointError
from ...model.pretrained.companions import adapter_files
from ...network.method import Weights
from ...run.foreign_resume import other_model
from ...storage import files

logger = logging.getLogger(__name__)
# Settings of an adapter that change what its weights mean; targets and rank show in its tensors.
MEANING = (
    *("lora_alpha", "alpha_pattern", "use_rslora", "use_dora", "bias", "fan_in_fan_out"),
    *("layer_replication", "lora_bias", "alora_invocation_tokens", "use_qalora"),
)
SETTINGS = {"lora_alpha": ".alpha", "use_rslora": ".rslora", "use_dora": ".dora"}  # in a recipe
SHOWN = ("r", "rank_pattern", "target_modules", "target_parameters", "modules_to_save", "peft_type")


def open_same(folder: Path, policy: nn.Module, weights: Weights) -> TensorSource:
    """The weights in ``folder``, of a Hugging Face model or a PEFT adapter.

    Raises ``CheckpointError`` if their names, shapes or adapter settings are not those of
    ``policy``, the model being trained, and its ``weights``.
    """
    is_adapter = weights.is_adapter
    layout = detect_layout(folder)
    if layout is None and not any(folder.glob("*_model*.bin")):  # which are pickles, told below
        raise CheckpointError(
            f"{folder}: it contains no weights ({MODEL} or {ADAPTER}); resume from another "
            "checkpoint"
        )
    if layout is not None and layout.is_adapter != is_adapter:
        found, kind = ("an adapter", "a full model")[:: 1 if layout.is_adapter else -1]
        raise CheckpointError(
            f"{folder}: it contains {found}, but the recipe's method trains {kind}; "
            f"set method to {'lora' if layout.is_adapter else 'full'}"
        )
    if is_adapter and weights.is_converted:
        raise CheckpointError(
            f"{folder}: it contains one adapter, but this run has frozen ones beside it "
            "(model.frozen_adapters, method.lora.init); leave them out, or start a new run from it "
            f"with model.adapter={folder}"
        )
    source = open_folder(folder)
    if is_adapter:
        _refuse_drift(folder, policy)
    shapes = source.shapes()
    if is_adapter:
        own = weights.state_dict()
        shapes = {n: s for n, s in shapes.items() if n in own or not _is_base(source, n, policy)}
    if problem := other_model(shapes, weights):
        hint = f" ({_targets(folder, policy)})" if is_adapter else ""
        raise CheckpointError(f"{folder}: {problem}{hint}")
    return source


def _is_base(source: TensorSource, name: str, policy: nn.Module) -> bool:
    """Whether it is the base's: PEFT adds embeddings that are a target or were resized."""
    own = policy.state_dict().get(name)
    if own is None or tuple(own.shape) != source.shapes()[name]:
        return False
    return torch.equal(read_whole(source, name).to(own.dtype), own.cpu())


def _configs(folder: Path, policy: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """``adapter_config.json`` in the folder, and as this run would write it."""
    path = folder / ADAPTER_CONFIG
    with files.raising(CheckpointError):
        theirs = strict_json.read_object(path)
    return theirs, json.loads(adapter_files(policy)[ADAPTER_CONFIG])


def _refuse_drift(folder: Path, policy: nn.Module) -> None:
    """Reject an adapter with equal tensors but other settings."""
    theirs, ours = _configs(folder, policy)
    where = folder / ADAPTER_CONFIG
    for name in ("peft_type", *MEANING):
        was, now = theirs.get(name), ours.get(name)
        if _given(was) != _given(now):
            raise CheckpointError(
                f"{where}: {name} is {was} in it and {now} in this run; set "
                f"method.lora{SETTINGS.get(name, '')} to the checkpoint's value, or start a new "
                f"run from it with model.adapter={folder}"
            )
    init = str(theirs.get("init_lora_weights")).lower()
    if init.startswith(CHANGED_BASE):
        raise CheckpointError(
            f"{where}: init_lora_weights {init} changed the base at the start of training, so "
            "its moments belong to that base only; this run's base is the original model"
        )
    base, here = str(theirs.get("base_model_name_or_path")), str(ours["base_model_name_or_path"])
    if Path(base).name not in here:
        logger.warning(
            "%s: the adapter was trained on %s, this run's base is %s", where, base, here
        )
    if theirs.get("lora_dropout") != ours["lora_dropout"]:
        logger.warning(
            "%s: lora_dropout was %s and is %s now",
            where,
            theirs.get("lora_dropout"),
            ours["lora_dropout"],
        )


def _given(value: object) -> object:
    """None for every equivalent of it."""
    return None if value in (None, False, "none", {}, []) else value


def _targets(folder: Path, policy: nn.Module) -> str:
    theirs, ours = _configs(folder, policy)
    odd = [n for n in SHOWN if _sorted(theirs.get(n)) != _sorted(ours.get(n))]
    pairs = (f"{n} {_sorted(theirs.get(n))} in it, {_sorted(ours.get(n))} here" for n in odd)
    return "; ".join(pairs) or "its adapter_config.json is the same"


def _sorted(value: object) -> object:
    return sorted(map(str, value)) if isinstance(value, list) else value
