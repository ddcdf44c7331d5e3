"""Find LLaMA-Factory's arguments in a file or on a command line, and convert them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..document import Document
from ..files import SUFFIXES, read_text
from ..other_yaml import sources_of
from ..overrides import Overrides
from ..yaml import parse
from .arguments import ARGUMENTS
from .command_line import is_command_line, read_command_line, split_overrides
from .conversion import Translation, is_llamafactory, translate, with_values


def find_translation(words: Sequence[str]) -> tuple[Translation, list[str]] | None:
    """The arguments of a command, ``FILE key=value ...`` or ``--key value ...``, converted, and
    the overrides of a recipe's fields among them; None if they are not LLaMA-Factory's. Raises
    ``RecipeError``: an argument is unknown or not supported."""
    if is_command_line(words):
        document, overrides = read_command_line(words)
        return translate(document), overrides
    path, rest = Path(words[0]), words[1:]
    if path.suffix not in SUFFIXES or not path.is_file():
        return None
    document = parse(read_text(path), str(path))
    is_theirs = is_llamafactory(document.data) and not sources_of(document.data)
    return translate_document(document, rest) if is_theirs else None


def translate_document(document: Document, overrides: Overrides) -> tuple[Translation, list[str]]:
    """The arguments in ``document`` with ``overrides`` of them, converted, and the other overrides.
    Raises ``RecipeError`` as ``translate``."""
    if isinstance(overrides, Mapping):
        theirs = {key: value for key, value in overrides.items() if key in ARGUMENTS}
        if len(theirs) < len(overrides):
            raise TypeError("overrides of a foreign file are arguments of it, or texts")
        return translate(with_values(document, theirs)), []
    values, rest = split_overrides(overrides)
    return translate(with_values(document, values)), rest
