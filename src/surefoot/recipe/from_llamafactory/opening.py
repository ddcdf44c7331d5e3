"""Find LLaMA-Factory's arguments in a file or on a command line, and convert them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...schema import Problem
from ..document import Document
from ..files import SUFFIXES, read_text
from ..other_yaml import sources_of
from ..overrides import Overrides
from ..yaml import parse
from .arguments import ARGUMENTS
from .arguments.argument import RefusedArgumentError
from .command_line import is_command_line, read_command_line, split_overrides
from .commands import Command, command_of
from .conversion import Translation, given_arguments, is_llamafactory, translate, with_values


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


def find_command(
    name: str, words: Sequence[str], environment: Mapping[str, str] = os.environ
) -> Command | None:
    """What `llamafactory-cli NAME FILE key=value ...` is here, with the options of Surefoot that
    follow its words; None if the words are not LLaMA-Factory's, or those of a run. Raises
    ``RecipeError``."""
    if is_command_line(words):
        document, _ = read_command_line(words)
        own: list[str] = []
    elif words and Path(words[0]).suffix in SUFFIXES and Path(words[0]).is_file():
        rest = words[1:]
        count = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
        values, others = split_overrides(rest[:count])
        document = with_values(parse(read_text(Path(words[0])), words[0]), values)
        own = [*others, *rest[count:]]
    else:
        return None
    if not is_llamafactory(document.data):
        return None
    given = given_arguments(document, environment)
    try:
        found = command_of(name, given)
    except RefusedArgumentError as error:
        raise document.error([Problem((error.argument,), str(error))]) from None
    return None if found is None else replace(found, words=(*found.words, *own))


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
