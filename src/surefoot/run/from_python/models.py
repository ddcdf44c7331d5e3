"""A model and a tokenizer from memory, written into the folder of the run.

An adapter needs its base, and a resume from scratch the first weights, long after the program that
had them has ended. The object itself is not trained: its copy is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import torch
import xxhash
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from ...checkpoint.disk.commit import new_folder, write_small
from ...checkpoint.disk.folder import TOKENIZER
from ...errors import ModelError, RecipeError
from ...model.pretrained.companions import saved_files
from ...model.pretrained.loading import resolve
from ...model.section import ModelSection
from ...recipe.recipe import Recipe
from ...storage.address import Address

logger = logging.getLogger(__name__)
PLACEHOLDER = "given as an object"  # the path of a model that has none yet


def with_model(
    recipe: Recipe,
    model: nn.Module | None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None,
) -> Recipe:
    """``recipe`` for this model and tokenizer; one that is None is that of the recipe, or of the
    model's folder. Raises ``RecipeError`` or ``ModelError`` if they cannot be written."""
    if isinstance(recipe.train.output_dir, Address):
        raise RecipeError(
            "train.output_dir: a model or tokenizer object is written into the folder of the run, "
            f"and {recipe.train.output_dir} is a URL; save it and set model.path"
        )
    if isinstance(tokenizer, str | Path):
        known = _tokenizer_at(str(tokenizer), f"tokenizer: no tokenizer in {str(tokenizer)!r}")
    elif tokenizer is None:
        name = getattr(model, "name_or_path", "")
        known = _tokenizer_at(
            name, f"model: no tokenizer in {name!r}, where it comes from; give one"
        )
    else:
        known = tokenizer
    files, folder = saved_files(known), recipe.train.folder.absolute()
    if model is None:
        base = resolve(recipe.model)
        target = folder / f"base-model-{_digest(files, base)}"
        return _at(recipe, target if target.exists() else _linked(base, files, target))
    if recipe.model.path != PLACEHOLDER:
        raise RecipeError("model.path: the model is given as an object, too; keep one of them")
    whole = _checked(model)
    target = folder / f"base-model-{_digest(files, whole)}"
    return _at(recipe, target if target.exists() else _saved(whole, files, target))


def _at(recipe: Recipe, folder: Path) -> Recipe:
    model: ModelSection = replace(recipe.model, path=str(folder), revision=None)
    return replace(recipe, model=model)


def _checked(model: nn.Module) -> PreTrainedModel:
    if not isinstance(model, PreTrainedModel):
        advice = (
            "give its base model, and its saved folder as model.adapter"
            if hasattr(model, "peft_config")
            else "expected a model of transformers"
        )
        raise ModelError(f"model: {type(model).__name__} cannot be trained: {advice}")
    if getattr(model.config, "quantization_config", None) is not None:
        raise ModelError("model: it is quantized; give model.path and model.quantization_bit")
    return model


def _tokenizer_at(name: str, problem: str) -> PreTrainedTokenizerBase:
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        raise ModelError(problem) from None
    return found


def _digest(files: Mapping[str, bytes], model: PreTrainedModel | Path) -> str:
    """Equal for equal weights, configuration and tokenizer."""
    digest = xxhash.xxh3_128()
    for name, data in sorted(files.items()):
        digest.update(name.encode() + data)
    if isinstance(model, Path):
        digest.update(str(model).encode())
        return digest.hexdigest()[:12]
    digest.update(model.config.to_json_string().encode())
    for name, tensor in model.state_dict().items():
        values = tensor.detach().cpu().contiguous().flatten()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]


def _saved(model: PreTrainedModel, tokenizer: Mapping[str, bytes], target: Path) -> Path:
    disable_progress_bar()  # of transformers
    with new_folder(target) as folder:
        model.save_pretrained(folder)
        write_small(folder, tokenizer)
    logger.info("model: a copy of the given object is trained, from %s", target)
    return target


def _linked(base: Path, tokenizer: Mapping[str, bytes], target: Path) -> Path:
    """Links to the files of a model, with another tokenizer."""
    with new_folder(target) as folder:
        write_small(folder, tokenizer)
        for path in sorted(base.iterdir()):
            is_tokenizer = any(fnmatch(path.name, pattern) for pattern in TOKENIZER)
            if not is_tokenizer and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path.absolute())
    return target
