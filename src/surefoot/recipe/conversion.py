"""Convert another program's file, or its command line, to a recipe in YAML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import RecipeError
from ..schema import Problem, settings
from .document import Document
from .files import SUFFIXES, read_text
from .from_llamafactory.conversion import Translation
from .from_llamafactory.opening import find_translation
from .from_trainers.conversion import translate_from
from .importers import IMPORTERS, ConvertedFile, importer_of
from .other_yaml import check_recipe, refuse_v1, sources_of
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
        document = parse(read_text(path), words[0])
        refuse_v1(document)
        importer = importer_of(document)
        if importer is None:
            raise _unknown(document)
        return importer.convert(document, words[1:])
    return _converted(*found)


def _converted(translation: Translation, overrides: Sequence[str]) -> ConvertedFile:
    load_translation(translation, overrides)  # which rejects what no recipe can have
    document = override(Recipe, translated_document(translation), overrides)
    return ConvertedFile(emit(document.data), list(translation.notes()))


def _unknown(document: Document) -> RecipeError:
    """The error for a file of no known program."""
    found = document.data if isinstance(document.data, dict) else {}
    if {"model", "data", "train"} & found.keys() <= settings(Recipe).keys() and "stage" in found:
        return document.error(
            [
                Problem(
                    (), "this is a recipe already; `surefoot recipe show` prints all its settings"
                )
            ]
        )
    others = "".join(
        f", nor {one.title}': it has none of the keys {', '.join(one.known_by[:5])}"
        for one in IMPORTERS.values()
    )
    message = f"neither LLaMA-Factory's YAML, which has model_name_or_path{others}"
    return document.error([Problem((), message)])
