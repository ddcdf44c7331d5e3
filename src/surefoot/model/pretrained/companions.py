"""The small files that open a folder of weights: configuration, tokenizer, template."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..adapters import has_frozen, together
from ..section import ModelSection
from .config import with_old_rope

_CONFIG, _TOKENS = "tokenizer_config.json", "special_tokens_map.json"
_EXPERTS = "num_experts"
STRAY = ("is_local", "local_files_only")  # what transformers leaks into tokenizer_config.json


def tokenizer_files(
    tokenizer: PreTrainedTokenizerBase, own: Mapping[str, bytes]
) -> dict[str, bytes]:
    """``tokenizer.json``, ``tokenizer_config.json``, ``chat_template.jinja`` and their like.

    ``own`` are the files that it was loaded from. They stay as they are, but for what has changed
    since: what transformers 5 writes in their place, transformers 4 does not open.
    """
    files = saved_files(tokenizer)
    config = {n: v for n, v in json.loads(files[_CONFIG]).items() if n not in STRAY}
    before = saved_files(type(tokenizer).from_pretrained(tokenizer.name_or_path)) if own else {}
    stored = json.loads(own.get(_CONFIG, b"{}"))
    named = {name: data for name, data in before.items() if "/" in name}  # other chat templates
    if not own or _vocabulary(files) != _vocabulary(before):
        if config.get("tokenizer_class") == "TokenizersBackend":  # a name of transformers 5
            config["tokenizer_class"] = stored.get("tokenizer_class", "PreTrainedTokenizerFast")
        if isinstance(config.get("extra_special_tokens"), list):  # there, names with their tokens
            config["additional_special_tokens"] = config.pop("extra_special_tokens")
        return {**named, **files, _CONFIG: _json(config)}
    known = {n: v for n, v in json.loads(before[_CONFIG]).items() if n not in STRAY}
    changed = {name: value for name, value in config.items() if value != known.get(name)}
    files, before = ({n: f[n] for n in f if n.endswith(".jinja")} for f in (files, before))
    if not changed and files.items() <= before.items():
        return dict(own)
    if stored.pop("chat_template", None) is None and not changed:
        return {**own, **before, **files}
    tokens = json.loads(own.get(_TOKENS, b"{}"))  # which has precedence in some versions
    tokens |= {name: value for name, value in changed.items() if name in tokens}
    maps = {_TOKENS: _json(tokens)} if tokens else {}
    return {**own, **maps, **before, **files, _CONFIG: _json({**stored, **changed})}


def _vocabulary(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The content of ``tokenizer.json`` but for the state of its last call."""
    content = json.loads(files.get("tokenizer.json", b"{}"))
    return {**content, "padding": None, "truncation": None}


def saved_files(processing: Any) -> dict[str, bytes]:
    """What the ``save_pretrained`` of a tokenizer or processor writes."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            processing.save_pretrained(folder)
        except Exception as error:  # the Rust part of tokenizers knows no OSError
            code = re.search(r"\(os error (\d+)\)", str(error))
            if code is None:
                raise
            number = int(code[1])
            raise OSError(number, os.strerror(number), str(Path(folder).parent)) from error
        written = sorted(Path(folder).rglob("*"))
        return {str(p.relative_to(folder)): p.read_bytes() for p in written if p.is_file()}


def model_files(
    model: PreTrainedModel, folder: Path | None, stop_token_ids: Sequence[int]
) -> dict[str, bytes]:
    """``config.json``, ``generation_config.json`` and, for models with custom code, that code.

    Args:
        model: as it is saved, its vocabulary and dtype included.
        folder: where it was loaded from, if it has custom code.
        stop_token_ids: tokens that end a response; added to the end-of-sequence tokens.
    """
    config = _whole_config(model.config)
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


def _whole_config(config: PretrainedConfig) -> dict[str, Any]:
    stored = json.loads(config.to_json_string(use_diff=True))
    if config.attribute_map.get(_EXPERTS) in stored:  # where transformers 4 has this name
        stored[_EXPERTS] = stored[config.attribute_map[_EXPERTS]]
    if stored.get("time_step_limit") == [0.0, {"__float__": "Infinity"}]:
        del stored["time_step_limit"]  # the default of 4 and 5, in words that 4 does not read
    return with_old_rope(config.to_dict(), stored)


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
        found["config.json"] = _json(_whole_config(inner.config))
    return found


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
