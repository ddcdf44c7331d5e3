"""Export a model, its adapter merged, or the adapter alone as one GGUF file, with an Ollama
Modelfile beside it.

Of an adapter, which llama.cpp puts on a GGUF of its base, the file has for each adapted tensor
``NAME.lora_a`` and ``NAME.lora_b``; llama.cpp adds alpha / r B A. Where an update is scaled in
another way (rank-stabilized LoRA, alphas of their own), the difference is multiplied into B.

A Modelfile: from which file Ollama makes a model, with which stops and sampling.

It has no ``TEMPLATE``: Ollama chooses one of the templates that it knows by the
``tokenizer.chat_template`` of the file. A template in Go's language would be a second one to keep
equal to the one of training.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFType, GGUFWriter, Keys
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ...checkpoint.layouts.detection import is_sequence_classification
from ...checkpoint.layouts.opening import open_folder
from ...checkpoint.sources import Progress, TensorsInMemory, TensorSource, read_whole
from ...errors import ModelError, counted
from ...model.adapter_files import attach_empty
from ...model.config import auto_class
from ...model.tokenizer import load_tokenizer
from ...model.weight_matrices import adapted
from ...parallel.sharding import Box
from ...recipe.files import ADAPTER, read_text
from ...recipe.recipe import Recipe
from ...use.exporting.conversion import meta_model, stop_token_ids, whole_model
from ...use.exporting.receipt import Artefact, receipt_path, write_receipt
from ...use.model_loading import ModelFolders
from .architectures import GGUFArchitecture, add_settings, architecture_of, check_rope, window_note
from .formats import FORMATS, Format, LayerCounts, fitting, tensor_type
from .gguf_file import (
    FileTensor,
    GGUFContents,
    check_complete,
    file_tensors,
    gguf_name,
    head_rows,
    name_map,
    refuse_existing,
    write_files,
)
from .vocabulary import add_stops, add_vocabulary, model_name, vocabulary_of

logger = logging.getLogger(__name__)
_EMBEDDINGS, _OUTPUT = "token_embd.weight", "output.weight"


def write_model(parts: ModelFolders, target: Path, quantize: str, progress: Progress) -> None:
    """Write the model of ``parts`` into the new file ``target``. Raises ``ModelError`` if it is no
    language model that llama.cpp runs as it was trained, ``CheckpointError`` if tensors are
    damaged or missing, or the disk fails."""
    beside, where = modelfile_of(target), str(parts.folder)
    refuse_existing(target, beside, receipt_path(target))
    if parts.is_scorer_run or any(is_sequence_classification(folder) for folder in parts.all):
        raise ModelError(
            f"{where}: is a reward model or classifier; GGUF is for models that write text"
        )
    source, small = whole_model(parts)
    config = config_of(small, where)
    row = architecture_of(config, where)
    check_rope(config, row, where)
    if note := window_note(config, row):
        logger.warning("%s: %s", where, note)
    tensors = file_tensors(source.shapes(), config, row, where)
    with torch.device("meta"):  # what transformers builds for that configuration
        expected_state = auto_class(config).from_config(config).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in expected_state.items()}
    # Names are checked both ways: what is left out would otherwise show in the
    # answers only (decisions/0063).
    check_complete(tensors, file_tensors(shapes, config, row, where), where)

    tokenizer, num_rows = load_tokenizer(parts.tokenizer), tensors[_EMBEDDINGS].shape[0]
    if len(tokenizer) > num_rows:
        logger.warning(
            "%s: the tokenizer has %s, the model embeddings for %d; the others are omitted",
            *(where, counted(len(tokenizer), "token"), num_rows),
        )
    format_ = FORMATS[quantize]
    types = types_of(tensors, config, row, format_)
    vocabulary = vocabulary_of(tokenizer, num_rows, where)
    stops = stop_token_ids(tokenizer)
    name = model_name(target.stem, tokenizer, row.name, where)

    def describe(writer: GGUFWriter) -> None:
        writer.add_type(GGUFType.MODEL)
        writer.add_name(name)
        writer.add_file_type(format_.file_type)
        add_settings(writer, config, row)
        add_vocabulary(writer, tokenizer, vocabulary)
        add_stops(writer, tokenizer, stops)

    generation = json.loads(small.get("generation_config.json", b"{}"))
    for_ollama = ModelForOllama(
        tokenizer, stops, config.max_position_embeddings, parts.recipe, generation
    )
    text = modelfile_text(for_ollama, [f"FROM ./{target.name}"])
    contents = GGUFContents(row.name, tensors, types, describe)
    write_files(target, contents, source, {beside: text}, progress)
    count = sum(prod(tensor.shape) for tensor in tensors.values())
    write_receipt(target, parts, Artefact("gguf", quantize, count), [beside.name])


def config_of(small: Mapping[str, bytes], where: str) -> PretrainedConfig:
    """The configuration that an export writes."""
    content = json.loads(small["config.json"])
    kind = content.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise ModelError(f"{where}: model_type {kind} cannot be written as GGUF")
    config: PretrainedConfig = CONFIG_MAPPING[kind].from_dict(content)
    return config


def types_of(
    tensors: Mapping[str, FileTensor],
    config: PretrainedConfig,
    row: GGUFArchitecture,
    format_: Format,
) -> dict[str, GGMLQuantizationType]:
    """The type of every tensor; says which rows do not fit the one that the format wants."""
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    # llama.cpp tells Llama 2 70B from 65B by this: 8 query heads share one of attn_v
    # there, so more bits cost little.
    is_70b = row.name == "llama" and config.num_hidden_layers == 80 and num_heads != num_kv_heads
    shape = LayerCounts(
        config.num_hidden_layers,
        getattr(config, "num_experts", 0) or 0,
        _OUTPUT not in tensors,
        is_70b,
    )
    format_types = {n: tensor_type(n, t.shape, format_, shape) for n, t in tensors.items()}
    types = {n: fitting(kind, tensors[n].shape[-1]) for n, kind in format_types.items()}
    changed: dict[tuple[str, str, int], int] = {}
    for name, kind in format_types.items():
        if types[name] != kind:
            key = (kind.name, types[name].name, tensors[name].shape[-1])
            changed[key] = changed.get(key, 0) + 1
    for (kind_, instead, columns), count in changed.items():
        logger.warning(
            "%s with rows of %d, which %s cannot hold, %s written as %s, as llama.cpp does",
            *(counted(count, "tensor"), columns, kind_, "is" if count == 1 else "are", instead),
        )
    return types


_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_FLOATS = ("f32", "f16", "bf16", "q8_0")


@dataclass(frozen=True)
class _Pair:
    """The factors of one module's update, B with what llama.cpp's scale lacks."""

    module: str
    a: torch.Tensor
    b: torch.Tensor


def write_adapter(parts: ModelFolders, target: Path, quantize: str, progress: Progress) -> None:
    """Write the adapter of ``parts`` into the new file ``target``. Raises ``ModelError`` if there
    is none, or if it changes what a GGUF adapter cannot."""
    beside = modelfile_of(target)
    refuse_existing(target, beside, receipt_path(target))
    if parts.adapter is None:
        raise ModelError(f"{parts.folder}: is no adapter; --to gguf writes the complete model")
    format_ = FORMATS[quantize]
    kind = format_.main
    if kind.name.lower() not in _FLOATS:
        raise ModelError(
            f"--to gguf-adapter: an adapter is written as one of {', '.join(_FLOATS)}; its base "
            "may have any other format"
        )
    where = str(parts.adapter)
    model = meta_model(parts.model, False, parts.reading)
    row = architecture_of(model.config, str(parts.model))
    check_rope(model.config, row, str(parts.model))
    # Before _scales wraps the model: PEFT's parameters are not of the base.
    size = model.num_parameters()
    settings = json.loads(read_text(parts.adapter / ADAPTER))
    alpha = float(settings.get("lora_alpha") or 0)
    _refuse_others(settings, alpha, where)
    pairs = _pairs(open_folder(parts.adapter), _scales(model, parts.adapter), alpha, where)
    tensors, source = _tensors(pairs, model.config, row, where)
    types = {name: fitting(kind, t.shape[-1]) for name, t in tensors.items()}

    def describe(writer: GGUFWriter) -> None:
        writer.add_type(GGUFType.ADAPTER)
        writer.add_name(target.stem)
        writer.add_file_type(format_.file_type)
        writer.add_string(Keys.Adapter.TYPE, "lora")
        writer.add_float32(Keys.Adapter.LORA_ALPHA, alpha)

    contents = GGUFContents(row.name, tensors, types, describe)
    tokenizer = load_tokenizer(parts.tokenizer)
    for_ollama = ModelForOllama(
        tokenizer,
        stop_token_ids(tokenizer),
        model.config.max_position_embeddings,
        parts.recipe,
    )
    text = modelfile_text(for_ollama, [f"FROM {parts.model}", f"ADAPTER ./{target.name}"])
    write_files(target, contents, source, {beside: text}, progress)
    artefact = Artefact("gguf-adapter", format_.main.name.lower(), size)
    write_receipt(target, parts, artefact, [beside.name])


def _refuse_others(settings: Mapping[str, Any], alpha: float, where: str) -> None:
    """Only plain low-rank updates have a place in the file."""
    descriptions = {
        "use_dora": "DoRA",
        "modules_to_save": "modules trained in full (modules_to_save)",
        "trainable_token_indices": "new rows of embeddings (trainable_token_indices)",
        "target_parameters": "adapted experts (target_parameters)",
        "alora_invocation_tokens": "activated LoRA",
    }
    kind = settings.get("peft_type")
    unsupported = [text for key, text in descriptions.items() if settings.get(key)]
    unsupported += [f"an adapter of type {kind}"] if kind != "LORA" else []
    unsupported += ["lora_alpha 0"] if kind == "LORA" and not alpha else []
    unsupported += ["biases (bias)"] if settings.get("bias", "none") != "none" else []
    if unsupported:
        raise ModelError(
            f"{where}: a GGUF adapter cannot contain {', '.join(unsupported)}; export it merged, "
            "with --to gguf"
        )


def _scales(model: Any, adapter: Path) -> dict[str, float]:
    """By which PEFT multiplies the update of each module. Changes ``model``."""
    with torch.device("meta"):
        wrapped = attach_empty(model, adapter)
    names = {id(module): name.removeprefix(_PREFIX) for name, module in wrapped.named_modules()}
    layers: dict[int, Any] = {id(layer): layer for layer in adapted(wrapped).values()}
    return {names[key]: float(layer.scaling["default"]) for key, layer in layers.items()}


def _pairs(
    source: TensorSource, scales: Mapping[str, float], alpha: float, where: str
) -> list[_Pair]:
    """The factors of every module, scaled as llama.cpp scales them."""
    names = set(source.shapes())
    modules = sorted({n.removesuffix(_A).removesuffix(_B) for n in names})
    pairs = []
    for stored in modules:
        module = stored.removeprefix(_PREFIX)
        if not {stored + _A, stored + _B} <= names or module not in scales:
            raise ModelError(
                f"{where}: {stored} has no place in a GGUF adapter; export it merged, with "
                "--to gguf"
            )
        a, b = (read_whole(source, stored + end).float() for end in (_A, _B))
        # llama.cpp multiplies by alpha / r itself, and r is the number of rows of A.
        pairs.append(_Pair(module, a, b * (scales[module] * len(a) / alpha)))
    return pairs


def _tensors(
    pairs: list[_Pair], config: PretrainedConfig, row: GGUFArchitecture, where: str
) -> tuple[dict[str, FileTensor], TensorSource]:
    """The tensors of the file; rows of B change places as those of its base do."""
    names, tensors, values = name_map(config, row), {}, {}
    for pair in pairs:
        name = gguf_name(f"{pair.module}.weight", names, row, f"{where}: {pair.module}")
        if name == "output.weight" and config.tie_word_embeddings:
            raise ModelError(
                f"{where}: adapts lm_head, which the file of a tied base has not; export it "
                "merged, with --to gguf"
            )
        if name == "token_embd.weight":
            raise ModelError(f"{where}: adapts the embeddings; export it merged, with --to gguf")
        for end, tensor in ((".lora_a", pair.a), (".lora_b", pair.b)):
            values[name + end] = tensor
            box = Box.whole(tuple(tensor.shape))
            moved = head_rows(name, config, row) if end == ".lora_b" else 0
            tensors[name + end] = FileTensor(name + end, box.shape, ((name + end, box),), moved)
    return tensors, TensorsInMemory(values)


_QUOTES = '"""'
_POSITIONS = 4096  # that Ollama gives a model by itself


@dataclass(frozen=True)
class ModelForOllama:
    """What a Modelfile says besides the files."""

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: Sequence[int]
    num_positions: int
    recipe: Recipe | None = None
    generation: Mapping[str, object] | None = None
    """Of ``generation_config.json``, for models without a recipe."""


def modelfile_of(target: Path) -> Path:
    """The path of the Modelfile of a GGUF file."""
    return target.with_suffix(".Modelfile")


def modelfile_text(model: ModelForOllama, lines: Sequence[str]) -> bytes:
    """The Modelfile that begins with ``lines`` (``FROM``, ``ADAPTER``)."""
    # The last line names the artefact: FROM, or ADAPTER after the FROM of its base.
    name = lines[-1].rpartition("/")[2].removesuffix(".gguf").lower()
    template = (
        "Ollama recognizes the chat template only if it is one that it knows; check it with: "
        f"ollama show --template {name}"
    )
    logger.info("%s", template)
    parts = [f"# ollama create {name} -f THIS_FILE", f"# {template}", *lines]
    system = None if model.recipe is None else model.recipe.data.default_system
    # Three quotes at the end of a line end the text there, and cannot be escaped.
    lines_before = [] if system is None else re.split("[\r\n]", system)[:-1]
    if any(line.rstrip().endswith(_QUOTES) for line in lines_before):
        logger.warning(
            "data.default_system: a line of it ends with three quotes, so the Modelfile cannot "
            "contain it as SYSTEM; pass it to Ollama as the first message"
        )
    elif system is not None:
        parts.append(f"SYSTEM {_QUOTES}{system}{_QUOTES}")
    stops = [model.tokenizer.convert_ids_to_tokens(token) for token in model.stop_token_ids]
    parts += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops]
    texts = () if model.recipe is None else model.recipe.generate.stop
    parts += [f"PARAMETER stop {_QUOTES}{text}{_QUOTES}" for text in texts]  # Ollama unescapes none
    parts += [f"PARAMETER {name} {value}" for name, value in _sampling(model).items()]
    mark = "" if model.num_positions < _POSITIONS else "# "  # more takes more memory
    parts.append(f"{mark}PARAMETER num_ctx {model.num_positions}")
    return ("\n".join(parts) + "\n").encode()


def _sampling(model: ModelForOllama) -> dict[str, object]:
    """As ``chat`` samples from the run; Ollama's own defaults would repeat and vary otherwise."""
    if model.recipe is not None:
        section = model.recipe.generate
        repeat = {"repeat_penalty": section.repetition_penalty}
        if not section.do_sample:
            # Ollama has no other switch for greedy decoding.
            return {"temperature": 0, **repeat}
        chosen = {"temperature": section.temperature, "top_p": section.top_p}
        return {**chosen, "top_k": section.top_k, "min_p": section.min_p, **repeat}
    generation_config = model.generation or {}
    if generation_config.get("do_sample") is False:
        return {"temperature": 0}
    settings = {n: generation_config.get(n) for n in ("temperature", "top_p", "top_k", "min_p")}
    return {name: value for name, value in settings.items() if value is not None}
