"""Export a model as one GGUF file, its adapter merged, with an Ollama Modelfile beside it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFType, GGUFWriter
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ...checkpoint.layouts.detection import is_sequence_classification
from ...checkpoint.sources.copying import Progress
from ...checkpoint.sources.source import Shape, TensorSource
from ...errors import ModelError, counted
from ...model.pretrained.tokenizer import load_tokenizer
from ...use.exporting.exported import whole_model
from ...use.exporting.merged_model import stop_token_ids
from ...use.model_loading import ModelFolders
from ...use.receipts.receipt import Artefact, receipt_path, write_receipt
from .architectures import GGUFArchitecture, architecture_of, window_note
from .formats import FORMATS, Format, LayerCounts, fitting, tensor_type
from .gguf_file import GGUFContents, refuse_existing, write_files
from .modelfile import ModelForOllama, modelfile_of, modelfile_text
from .settings import add_settings, check_rope
from .tensors import FileTensor, check_complete, file_tensors
from .vocabulary import add_stops, add_vocabulary, model_name, vocabulary_of

logger = logging.getLogger(__name__)
_EMBEDDINGS, _OUTPUT = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class ModelToWrite:
    """A complete model, ready to be written."""

    source: TensorSource
    config: PretrainedConfig
    row: GGUFArchitecture
    tokenizer: PreTrainedTokenizerBase
    tensors: Mapping[str, FileTensor]
    generation: Mapping[str, object]
    """Its generation_config.json."""
    where: str


def write_model(parts: ModelFolders, target: Path, quantize: str, progress: Progress) -> None:
    """Write the model of ``parts`` into the new file ``target``. Raises ``ModelError`` if it is no
    language model that llama.cpp runs as it was trained, ``CheckpointError`` if tensors are
    damaged or missing, or the disk fails."""
    beside = modelfile_of(target)
    refuse_existing(target, beside, receipt_path(target))
    model = open_whole(parts)
    format_ = FORMATS[quantize]
    types = types_of(model, format_)
    vocabulary = vocabulary_of(model.tokenizer, model.tensors[_EMBEDDINGS].shape[0], model.where)
    stops = stop_token_ids(model.tokenizer)

    name = model_name(target.stem, model.tokenizer, model.row.name, model.where)

    def describe(writer: GGUFWriter) -> None:
        writer.add_type(GGUFType.MODEL)
        writer.add_name(name)
        writer.add_file_type(format_.file_type)
        add_settings(writer, model.config, model.row)
        add_vocabulary(writer, model.tokenizer, vocabulary)
        add_stops(writer, model.tokenizer, stops)

    contents = GGUFContents(model.row.name, model.tensors, types, describe)
    for_ollama = ModelForOllama(
        model.tokenizer,
        stops,
        model.config.max_position_embeddings,
        parts.recipe,
        model.generation,
    )
    text = modelfile_text(for_ollama, [f"FROM ./{target.name}"])
    write_files(target, contents, model.source, {beside: text}, progress)
    count = sum(prod(tensor.shape) for tensor in model.tensors.values())
    write_receipt(target, parts, Artefact("gguf", quantize, count), [beside.name])


def open_whole(parts: ModelFolders) -> ModelToWrite:
    """The model with its adapter merged, checked to be what llama.cpp computes."""
    where = str(parts.folder)
    is_reward = parts.recipe is not None and parts.recipe.stage.spec.is_reward
    if is_reward or any(is_sequence_classification(folder) for folder in parts.all):
        raise ModelError(f"{where}: is a reward model; GGUF is for models that write text")
    source, small = whole_model(parts)
    config = config_of(small, where)
    row = architecture_of(config, where)
    check_rope(config, row, where)
    if note := window_note(config, row):
        logger.warning("%s: %s", where, note)
    tensors = file_tensors(source.shapes(), config, row, where)
    check_complete(tensors, file_tensors(model_shapes(config), config, row, where), where)
    tokenizer = load_tokenizer(parts.tokenizer)
    _say_cut(tokenizer, tensors[_EMBEDDINGS].shape[0], where)
    generation = json.loads(small.get("generation_config.json", b"{}"))
    return ModelToWrite(source, config, row, tokenizer, tensors, generation, where)


def config_of(small: Mapping[str, bytes], where: str) -> PretrainedConfig:
    """The configuration that an export writes."""
    content = json.loads(small["config.json"])
    kind = content.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise ModelError(f"{where}: model_type {kind} cannot be written as GGUF")
    found: PretrainedConfig = CONFIG_MAPPING[kind].from_dict(content)
    return found


def model_shapes(config: PretrainedConfig) -> dict[str, Shape]:
    """The tensors that transformers builds for a configuration."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def types_of(model: ModelToWrite, format_: Format) -> dict[str, GGMLQuantizationType]:
    """The type of every tensor; says which rows do not fit the one that the format wants."""
    config = model.config
    heads, own = config.num_attention_heads, config.num_key_value_heads
    is_70b = model.row.name == "llama" and config.num_hidden_layers == 80 and heads != own
    shape = LayerCounts(
        config.num_hidden_layers,
        getattr(config, "num_experts", 0) or 0,
        _OUTPUT not in model.tensors,
        is_70b,
    )
    wanted = {n: tensor_type(n, t.shape, format_, shape) for n, t in model.tensors.items()}
    found = {n: fitting(kind, model.tensors[n].shape[-1]) for n, kind in wanted.items()}
    changed: dict[tuple[str, str, int], int] = {}
    for name, kind in wanted.items():
        if found[name] != kind:
            key = (kind.name, found[name].name, model.tensors[name].shape[-1])
            changed[key] = changed.get(key, 0) + 1
    for (kind_, instead, columns), count in changed.items():
        logger.warning(
            "%s with rows of %d, which %s cannot hold, %s written as %s, as llama.cpp does",
            *(counted(count, "tensor"), columns, kind_, "is" if count == 1 else "are", instead),
        )
    return found


def _say_cut(tokenizer: PreTrainedTokenizerBase, rows: int, where: str) -> None:
    if len(tokenizer) > rows:
        logger.warning(
            "%s: the tokenizer has %s, the model embeddings for %d; the others are omitted",
            *(where, counted(len(tokenizer), "token"), rows),
        )
