"""Companions: the small files beside a model's weights, which are copied unchanged. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

# What lies beside the weights: the tokenizer, its template, processors, and code a model brings.
TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "*.jinja", "chat_template.json", "additional_chat_templates/*"),
)
MODEL = ("*.py", "preprocessor_config.json", "processor_config.json", "LICENSE*")


def companions_of(model: Path, tokenizer: Path) -> dict[str, bytes]:
    """The companion files of two folders."""
    return {**_matching(model, MODEL), **tokenizer_of(tokenizer)}


def tokenizer_of(folder: Path) -> dict[str, bytes]:
    """The files of the tokenizer in ``folder``; none if it is no folder."""
    return {} if folder == Path() else _matching(folder, TOKENIZER)  # "": it was not loaded


def _matching(folder: Path, patterns: Sequence[str]) -> dict[str, bytes]:
    paths = (path for pattern in patterns for path in sorted(folder.glob(pattern)))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.is_file()}
