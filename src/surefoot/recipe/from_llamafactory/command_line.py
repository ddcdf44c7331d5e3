"""LLaMA-Factory's command line as the content of a file: ``--stage sft --bf16 --max_steps -1``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from ...errors import RecipeError
from ...schema import Keys
from ..document import Document
from ..yaml import parse_argument, parse_text
from .arguments import ARGUMENTS

_KEY = re.compile(r"--[A-Za-z][\w-]*(=.*)?", re.DOTALL)
NAME = "command line"


def is_command_line(arguments: Sequence[str]) -> bool:
    """Whether the words of a command are arguments of LLaMA-Factory: ``--name value``."""
    return bool(arguments) and bool(_KEY.fullmatch(arguments[0]))


def read_command_line(arguments: Sequence[str]) -> tuple[Document, list[str]]:
    """The values by argument, and Surefoot's own overrides among them, which have a dot before
    ``=``. Raises ``RecipeError``: a value belongs to no argument, or an argument occurs twice."""
    values: dict[str, list[str]] = {}
    overrides: list[str] = []
    latest: list[str] | None = None
    for word in arguments:
        if _KEY.fullmatch(word):
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            if key in values:
                raise RecipeError(f"{NAME}: --{key} occurs twice; keep one")
            latest = values[key] = [value] if equals else []
        elif is_override(word):
            overrides.append(word)
        elif latest is None or (latest and not _takes_several(list(values)[-1])):
            raise RecipeError(f"{NAME}: {word!r} belongs to no argument; write --name value")
        else:
            latest.append(word)
    data = {key: _value(key, words) for key, words in values.items()}
    origins: dict[Keys, str] = {(key,): f"{NAME}: --{key}" for key in data}
    return Document(data, NAME, overrides=origins), overrides


def is_override(word: str) -> bool:
    """Whether a word sets a field of a recipe: ``optim.adamw.learning_rate=1e-5``."""
    path, equals, _ = word.partition("=")
    return bool(equals) and "." in path and "/" not in path


def _takes_several(key: str) -> bool:
    return key not in ARGUMENTS or ARGUMENTS[key].kind in ("list", "any")


def _value(key: str, words: Sequence[str]) -> object:
    """``--bf16`` alone is true; ``--no_NAME`` is false only as a key of its own."""
    if not words:
        return True
    if len(words) > 1:
        return list(words)
    word = words[0]
    if word.lstrip().startswith("{"):
        try:
            return json.loads(word)
        except ValueError:
            raise RecipeError(f"{NAME}: --{key}: not valid JSON: {word}") from None
    return None if word.lower() in ("none", "null") and key != "report_to" else word


def split_overrides(overrides: Sequence[str]) -> tuple[dict[str, object], list[str]]:
    """Overrides of their arguments (``learning_rate=1e-5``), and those of a recipe's fields."""
    theirs: dict[str, object] = {}
    ours: list[str] = []
    for word in overrides:
        key, equals, text = word.partition("=")
        if equals and key in ARGUMENTS:
            is_text = ARGUMENTS[key].kind == "text"
            place = f"{NAME}: {word}"
            theirs[key] = parse_text(text) if is_text else parse_argument(text, place)[0]
        else:
            ours.append(word)
    return theirs, ours
