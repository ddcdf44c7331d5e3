"""A model with new weights: initialized by transformers from a configuration and a seed, and
written once into the folder of the run.

All that follows sees an ordinary model folder, so a resume, an adapter and an export find the same
base without making it again (docs/decisions/0090).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from ..checkpoint.disk.commit import new_folder, write_small
from ..checkpoint.disk.folder import companions_of, tokenizer_of
from ..errors import ModelError, RecipeError
from ..model.base_identity import NEW_WEIGHTS
from ..model.config import (
    CONFIG,
    NO_MODEL_AT_ALL,
    auto_class,
    quantization_of,
    read_config,
    why_no_model,
)
from ..model.loading import WEIGHTS, resolve
from ..model.section import ModelSection
from ..storage import files
from ..storage.remote import Address
from ..training.section import TrainSection

logger = logging.getLogger(__name__)
_GENERATION = "generation_config.json"


def with_new_weights(
    section: ModelSection, train: TrainSection, *, saves_base: bool
) -> ModelSection:
    """``section``; if its model is to have new weights, with the folder that contains them as its
    path. They are written below the run's folder unless they are there.

    Raises:
        ModelError: no model can be made of the configuration, or it has no tokenizer beside it.
        RecipeError: an adapter's base would be on this machine alone.
    """
    if not section.new_weights:
        return section
    if isinstance(train.output_dir, Address) and not saves_base:
        raise RecipeError(
            "model.new_weights: checkpoints of an adapter do not contain its base, which is "
            f"written into the folder of the run, and {train.output_dir} is a URL; set "
            "train.output_dir to a folder, or method to full"
        )
    source, seed = resolve(section, weights=False), train.seed
    small = _small_files(source)
    target = (train.folder / f"new-weights-{_digest(source, small, seed)}").absolute()
    if not target.exists():
        _write(source, section, seed, small, target)
    return replace(section, path=str(target), revision=None, new_weights=False)


def _small_files(source: Path) -> dict[str, bytes]:
    """The tokenizer, and whatever else is beside a model's weights."""
    if not tokenizer_of(source):
        raise ModelError(
            f"model.path: no tokenizer in {source}; copy one (tokenizer.json and "
            f"tokenizer_config.json) beside {CONFIG}, which model.new_weights makes a model of"
        )
    generation = source / _GENERATION
    more = {_GENERATION: files.read_file(generation)} if generation.is_file() else {}
    return companions_of(source, source) | more


def _digest(source: Path, small: Mapping[str, bytes], seed: int) -> str:
    """Equal for equal configuration, tokenizer and seed."""
    hashed = files.Hash()
    for name, data in sorted({CONFIG: files.read_file(source / CONFIG), **small}.items()):
        hashed.update(f"{name}:{len(data)}:".encode() + data)
    hashed.update(str(seed).encode())
    return hashed.hexdigest()[:12]


def _write(
    source: Path, section: ModelSection, seed: int, small: Mapping[str, bytes], target: Path
) -> None:
    if any(source.glob(WEIGHTS)):
        logger.info("model.new_weights: the weights in %s are not used", source)
    model = initialized(source, section, seed)
    disable_progress_bar()  # of transformers
    record = {
        "configuration": section.path,
        "seed": seed,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    with new_folder(target) as folder:
        model.save_pretrained(folder)
        for name in small:
            (folder / name).unlink(missing_ok=True)
        write_small(folder, {**small, NEW_WEIGHTS: (json.dumps(record, indent=2) + "\n").encode()})
    count = sum(parameter.numel() for parameter in model.parameters())
    logger.info("new weights: %s, seed %d, in %s", f"{count:,} parameters", seed, target)


def initialized(source: Path, section: ModelSection, seed: int) -> PreTrainedModel:
    """The model of the configuration in ``source``, as ``torch.manual_seed(seed)`` and
    transformers' ``from_config`` make it on the CPU in float32. Raises ``ModelError``."""
    # Positions and the loss of routers are changed when the model is opened, as for any other.
    plain = replace(section, max_positions=None, router_aux_loss_coef=None)
    config = read_config(source, plain)
    if quantization_of(config) is not None:
        raise ModelError(
            f"{source / CONFIG}: new weights cannot be quantized; delete quantization_config"
        )
    # The next random numbers are those that a run with a finished folder has.
    with torch.random.fork_rng(devices=[]), files.raising(ModelError, f"{source}"):
        torch.default_generator.manual_seed(seed)
        try:
            model: PreTrainedModel = auto_class(config).from_config(
                config, dtype=torch.float32, trust_remote_code=section.trust_remote_code
            )
            if model.can_generate() and (source / _GENERATION).is_file():
                model.generation_config = GenerationConfig.from_pretrained(source)
        except NO_MODEL_AT_ALL as error:
            reason = why_no_model(error, source)
            raise ModelError(f"{source / CONFIG}: cannot make a model of it: {reason}") from None
    return model
