"""Load a pretrained model from a folder or a hub: checked and complete, or a clear error."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from ...errors import ModelError, counted, first_line
from ...storage import files
from ...storage.address import is_address
from ...storage.hubs import HUBS, HubError
from ...storage.weight_files import is_adapter
from ..section import ModelSection
from .config import read_config
from .quantized import as_dequantized, dequantization, disable_relayout, quantization

logger = logging.getLogger(__name__)
WEIGHTS = "*.safetensors"
PLACES = ("", "rank_00000/", "rank_0/", "checkpoint/rank_0/", "iteration_*/")  # ours, MindSpore's
FILES = ("*.json", WEIGHTS, "*.jinja", "*.model", "*.txt", "*.py", "*recipe.yaml")  # never pickles
_NOT_NEEDED = ("optimizer*.safetensors", "*/optimizer*.safetensors")  # of checkpoints of Surefoot
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def device() -> torch.device:
    """The GPU of this process if there is one, otherwise the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def resolve(section: ModelSection, *, weights: bool = True) -> Path:
    """The local folder of a model: ``section.path`` itself, or its files downloaded from the hub.

    Without ``weights``, configuration and tokenizer are enough.

    Raises:
        ModelError: no such folder and no such hub model, or a folder without safetensors weights.
    """
    if is_address(section.path):
        raise ModelError(
            f"model.path: {section.path} is a URL; expected a folder or a hub id. Write its latest "
            f"checkpoint to a folder with `surefoot export {section.path} FOLDER`, and name that"
        )
    local = Path(section.path)
    folder = local if files.exists(local) else fetch(section, weights=weights)
    if not files.is_folder(folder):
        raise ModelError(
            f"model.path: {folder} is a file; expected the folder that contains config.json"
        )
    if is_adapter(folder):
        raise ModelError(
            f"model.path: {folder} is an adapter; set model.adapter to it, and model.path to its "
            "base"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model.path: no config.json in {folder}; expected a Hugging Face model folder"
        )
    if weights:
        _refuse_pickles(folder)
    return folder


def fetch(section: ModelSection, *, weights: bool = True, inside: str = "") -> Path:
    """The files of a hub model (or adapter) in the local cache, without pickles; of one folder
    ``inside`` it, or all."""
    patterns = [f"{inside}{name}" for name in FILES if weights or name != WEIGHTS]
    try:
        return HUBS[section.hub].snapshot(
            "models",
            section.path,
            revision=section.revision,
            patterns=patterns,
            ignored=_NOT_NEEDED,
        )
    except HubError as error:
        raise ModelError(f"model.path: no folder {section.path!r}, and {error}") from None


def _refuse_pickles(folder: Path) -> None:
    if any(found for place in PLACES for found in folder.glob(f"{place}{WEIGHTS}")):
        return
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise ModelError(
            f"model.path: {folder} holds its weights as {pickles[0]}, a pickle, which can run code "
            "when read. If you trust it, write safetensors beside it once: python -c "
            f'"from transformers import AutoModelForCausalLM as M; M.from_pretrained('
            f"'{folder}', weights_only=True).save_pretrained('{folder}')\""
        )
    raise ModelError(f"model.path: no *.safetensors in {folder}; the weights are missing")


def load_model(
    folder: Path,
    section: ModelSection,
    *,
    dtype: torch.dtype | Literal["auto"],
    weights: Mapping[str, torch.Tensor] | None = None,
) -> PreTrainedModel:
    """The causal language model in ``folder``, on this process's device, in evaluation mode.

    ``weights`` are passed if the files in ``folder`` have a form that transformers cannot read. If
    they are on the meta device, so is the model.

    Raises:
        ModelError: not a causal language model, or weights that are missing, unexpected or damaged.
    """
    attention = None if section.attention == "auto" else section.attention
    is_empty = weights is not None and any(tensor.is_meta for tensor in weights.values())
    quantized = None if is_empty else quantization(section)
    placed = None if quantized is None else {"": device()}  # if not on the CPU first
    placed = {"": torch.device("meta")} if is_empty else placed
    disable_progress_bar()  # of transformers; the screen is ours
    try:
        config = read_config(folder, section)
        stored = dequantization(config, section, folder)
        config = as_dequantized(config)  # of those forms, ``weights`` has the values
        opened = AutoModelForCausalLM
        if weights is not None:  # the general class would look for files
            opened = AutoModelForCausalLM._model_mapping[type(config)]
        model, info = opened.from_pretrained(
            folder if weights is None else None,
            state_dict=None if weights is None else dict(weights),
            config=config,
            dtype=dtype,
            device_map=placed,
            quantization_config=quantized or stored,
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=section.trust_remote_code,
            ignore_mismatched_sizes=True,  # reported below, with their names
            output_loading_info=True,
        )
        if weights is not None:
            _name(model, folder)
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ModelError(
            f"{folder}: damaged or truncated file: {error}; fetch the model again"
        ) from None
    except (ValueError, OSError, ImportError, KeyError, RuntimeError) as error:
        raise ModelError(f"{folder}: cannot load the model: {first_line(error)}") from None
    _check_complete(folder, info)
    if quantized is not None:
        disable_relayout(model)
    is_there = is_empty or quantized is not None
    return (model if is_there else model.to(device())).eval()


def _name(model: PreTrainedModel, folder: Path) -> None:
    """Settings that a model takes from its folder when it is loaded from there."""
    model.name_or_path = model.config.name_or_path = str(folder)
    if model.can_generate():
        is_there = (folder / "generation_config.json").is_file()
        other = {} if is_there else {"config_file_name": "config.json", "_from_model_config": True}
        model.generation_config = GenerationConfig.from_pretrained(folder, **other)


def _check_complete(folder: Path, info: dict[str, object]) -> None:
    for kind, advice in (
        ("missing_keys", "the model needs them and would initialize them randomly"),
        ("unexpected_keys", "they are of another architecture than config.json says"),
        ("mismatched_keys", "their shapes are not what config.json says"),
    ):
        names = sorted(str(name) for name in info.get(kind) or ())  # type: ignore[attr-defined]
        if names:
            raise ModelError(
                f"{folder}: {counted(len(names), 'tensor')} {kind.removesuffix('_keys')} "
                f"({names[0]}): {advice}"
            )


def training_dtype(section: ModelSection) -> torch.dtype | Literal["auto"]:
    """The dtype in which to load weights, before a method selects the trainable ones."""
    if section.dtype != "auto":
        return DTYPES[section.dtype]
    return "auto" if torch.cuda.is_available() else torch.float32


def upcast_trained(model: nn.Module, section: ModelSection) -> None:
    """With ``dtype: auto``, trainable weights become float32, which loses no small updates."""
    if section.dtype == "auto":
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.float()


@torch.no_grad()
def grow_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Resize the embeddings for new tokens of the tokenizer; new rows are the mean of the old ones.

    Never shrinks them (vocabularies are often padded). Returns whether anything was resized.
    """
    before = model.get_input_embeddings().num_embeddings
    if len(tokenizer) <= before:
        return False
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    for weight in {id(m.weight): m.weight for m in embeddings if m is not None}.values():
        weight[before:] = weight[:before].float().mean(0).to(weight.dtype)
    logger.info(
        "resized embeddings: %s, initialized to the mean of the %d old ones",
        counted(len(tokenizer) - before, "new token"),
        before,
    )
    return True
