"""A LoRA adapter as a GGUF file, which llama.cpp and Ollama put on a GGUF of its base.

For each adapted tensor the file has ``NAME.lora_a`` and ``NAME.lora_b``; llama.cpp adds
alpha / r B A. Where an update is scaled in another way (rank-stabilized LoRA, alphas of their own),
the difference is multiplied into B.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFType, GGUFWriter, Keys
from transformers import PretrainedConfig

from ...checkpoint.layouts.opening import open_folder
from ...checkpoint.sources.copying import Progress
from ...checkpoint.sources.source import TensorsInMemory, TensorSource, read_whole
from ...errors import ModelError
from ...model.adaptable import adapted
from ...model.pretrained.adapter import attach_empty
from ...model.pretrained.tokenizer import load_tokenizer
from ...parallel.box import Box
from ...recipe.files import ADAPTER, read_text
from ...use.exporting.base_model import meta_model
from ...use.exporting.merged_model import stop_token_ids
from ...use.model_loading import ModelFolders
from ...use.receipts.receipt import Artefact, receipt_path, write_receipt
from .architectures import GGUFArchitecture, architecture_of
from .formats import FORMATS, Format, fitting
from .gguf_file import GGUFContents, refuse_existing, write_files
from .modelfile import ModelForOllama, modelfile_of, modelfile_text
from .settings import check_rope
from .tensors import FileTensor, gguf_name, head_rows, name_map

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
    kind = _kind(format_)
    where = str(parts.adapter)
    model = meta_model(parts.model, trust_remote_code=False)
    row = architecture_of(model.config, str(parts.model))
    check_rope(model.config, row, str(parts.model))
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


def _kind(format_: Format) -> GGMLQuantizationType:
    if format_.main.name.lower() not in _FLOATS:
        raise ModelError(
            f"--to gguf-adapter: an adapter is written as one of {', '.join(_FLOATS)}; its base "
            "may have any other format"
        )
    return format_.main


def _refuse_others(settings: Mapping[str, Any], alpha: float, where: str) -> None:
    """Only plain low-rank updates have a place in the file."""
    named = {
        "use_dora": "DoRA",
        "modules_to_save": "modules trained in full (modules_to_save)",
        "trainable_token_indices": "new rows of embeddings (trainable_token_indices)",
        "target_parameters": "adapted experts (target_parameters)",
        "alora_invocation_tokens": "activated LoRA",
    }
    kind = settings.get("peft_type")
    found = [text for key, text in named.items() if settings.get(key)]
    found += [f"an adapter of type {kind}"] if kind != "LORA" else []
    found += ["lora_alpha 0"] if kind == "LORA" and not alpha else []
    found += ["biases (bias)"] if settings.get("bias", "none") != "none" else []
    if found:
        raise ModelError(
            f"{where}: a GGUF adapter cannot contain {', '.join(found)}; export it merged, with "
            "--to gguf"
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
    found = []
    for stored in modules:
        module = stored.removeprefix(_PREFIX)
        if not {stored + _A, stored + _B} <= names or module not in scales:
            raise ModelError(
                f"{where}: {stored} has no place in a GGUF adapter; export it merged, with "
                "--to gguf"
            )
        a, b = (read_whole(source, stored + end).float() for end in (_A, _B))
        found.append(_Pair(module, a, b * (scales[module] * len(a) / alpha)))
    return found


def _tensors(
    pairs: list[_Pair], config: PretrainedConfig, row: GGUFArchitecture, where: str
) -> tuple[dict[str, FileTensor], TensorSource]:
    """The tensors of the file; rows of B change places as those of its base do."""
    names, made, values = name_map(config, row), {}, {}
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
            made[name + end] = FileTensor(name + end, box.shape, ((name + end, box),), moved)
    return made, TensorsInMemory(values)
