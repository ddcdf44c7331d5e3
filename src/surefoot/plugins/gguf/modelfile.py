"""A Modelfile: from which file Ollama makes a model, with which stops and sampling.

It has no ``TEMPLATE``: Ollama chooses one of the templates that it knows by the
``tokenizer.chat_template`` of the file. A template in Go's language would be a second one to keep
equal to the one of training.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ...recipe.recipe import Recipe

logger = logging.getLogger(__name__)
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
    name = lines[-1].rpartition("/")[2].removesuffix(".gguf").lower()
    template = (
        "Ollama recognizes the chat template only if it is one that it knows; check it with: "
        f"ollama show --template {name}"
    )
    logger.info("%s", template)
    parts = [f"# ollama create {name} -f THIS_FILE", f"# {template}", *lines]
    system = None if model.recipe is None else model.recipe.data.default_system
    if system is not None and _QUOTES not in system:
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
            return {"temperature": 0, **repeat}
        chosen = {"temperature": section.temperature, "top_p": section.top_p}
        return {**chosen, "top_k": section.top_k, "min_p": section.min_p, **repeat}
    given = model.generation or {}
    if given.get("do_sample") is False:
        return {"temperature": 0}
    names = ("temperature", "top_p", "top_k", "min_p")
    return {name: given[name] for name in names if given.get(name) is not None}
