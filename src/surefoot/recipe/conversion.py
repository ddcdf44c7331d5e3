"""Convert another program's file, or its command line, to a recipe in YAML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .files import SUFFIXES, read_text
from .from_llamafactory.conversion import Translation
from .from_llamafactory.opening import find_translation
from .from_mindformers.conversion import ConvertedFile, convert_file
from .from_trainers.conversion import translate_from
from .other_yaml import check_recipe, sources_of
from .overrides import override
from .recipe import Recipe, load_translation, translated_document
from .yaml import emit, parse


def convert_any(words: Sequence[str], source: str | None = None) -> ConvertedFile:
    """The recipe of ``FILE key=value ...`` or of ``--key value ...``, as YAML. ``source``, one of
    ``from_trainers.arguments.SOURCES``, says whose file it is if that is not certain. Raises
    ``RecipeError``: it is no known program's file, or a key is not supported."""
    path = Path(words[0])
    if source is None and path.suffix in SUFFIXES and path.is_file():
        document = parse(read_text(path), str(path))
        sources = sources_of(document.data)
        if len(sources) == 1:
            source = sources[0]
        elif sources:
            check_recipe(document)
    if source is not None:
        document = parse(read_text(path), words[0])
        return _converted(translate_from(source, document), words[1:])
    if (found := find_translation(words)) is None:
        return convert_file(path, words[1:])
    return _converted(*found)


def _converted(translation: Translation, overrides: Sequence[str]) -> ConvertedFile:
    load_translation(translation, overrides)  # which rejects what no recipe can have
    document = override(Recipe, translated_document(translation), overrides)
    return ConvertedFile(emit(document.data), list(translation.notes()))
