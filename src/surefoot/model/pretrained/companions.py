"""The small files that open a folder of weights: configuration, tokenizer, template."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..adapters.frozen import has_frozen, together
from ..section import ModelSection

STRAY = ("is_local", "local_files_only")  # what transformers leaks into tokenizer_config.json


def tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """``tokenizer.json``, ``tokenizer_config.json``, ``chat_template.jinja`` and their like."""
    files = saved_files(tokenizer)
    config = json.loads(files["tokenizer_config.json"])
    kept = {name: value for name, value in config.items() if name not in STRAY}
    files["tokenizer_config.json"] = _json(kept)
    return files


def saved_files(processing: Any) -> dict[str, bytes]:
    """What the ``save_pretrained`` of a tokenizer or processor writes."""
    with tempfile.TemporaryDirectory() as folder:
        processing.save_pretrained(folder)
        written = sorted(Path(folder).iterdir())
        return {path.name: path.read_bytes() for path in written if path.is_file()}


def model_files(
    model: PreTrainedModel, folder: Path | None, stop_token_ids: Sequence[int]
) -> dict[str, bytes]:
    """``config.json``, ``generation_config.json`` and, for models with custom code, that code.

    Args:
        model: as it is saved, its vocabulary and dtype included.
        folder: where it was loaded from, if it has custom code.
        stop_token_ids: tokens that end a response; added to the end-of-sequence tokens.
    """
    config = json.loads(model.config.to_json_string(use_diff=True))
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    code = {} if folder is None else {p.name: p.read_bytes() for p in sorted(folder.glob("*.py"))}
    files = {"config.json": _json(config), **code}
    if not model.can_generate():
        return files
    generation = json.loads(model.generation_config.to_json_string(use_diff=True))
    known = generation.get("eos_token_id")
    known = known if isinstance(known, list) else [known] if known is not None else []
    ends = list(dict.fromkeys([*known, *stop_token_ids]))
    if ends:
        generation["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return {**files, "generation_config.json": _json(generation)}


def adapter_files(model: nn.Module, base: ModelSection | None = None) -> dict[str, bytes]:
    """``adapter_config.json`` as PEFT writes it, but sorted, so that equal runs write equal bytes;
    and ``config.json`` of a base whose positions are extended. Frozen adapters are part of it.

    ``base`` names the model as the user did: a hub id rather than the folder of its download.
    """
    with tempfile.TemporaryDirectory() as folder:
        configs: Any = model.peft_config
        config = configs["default"]
        was_training, config.inference_mode = config.inference_mode, True
        config.save_pretrained(folder)
        config.inference_mode = was_training
        plain = json.loads((Path(folder) / "adapter_config.json").read_text())
    if base is not None:
        plain |= {"base_model_name_or_path": base.path, "revision": base.revision}
    for name in ("target_modules", "target_parameters", "modules_to_save"):
        if isinstance(plain.get(name), list):
            plain[name] = sorted(plain[name])
    if has_frozen(model):
        plain = together(plain, model)
    found = {"adapter_config.json": _json(plain)}
    if base is not None and base.max_positions is not None:
        inner: Any = model.get_base_model()  # type: ignore[operator]
        found["config.json"] = _json(json.loads(inner.config.to_json_string(use_diff=True)))
    return found


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
