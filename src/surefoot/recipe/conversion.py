"""Convert another program's file, or its command line, to a recipe in YAML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .from_llamafactory.opening import find_translation
from .from_mindformers.conversion import ConvertedFile, convert_file
from .overrides import override
from .recipe import Recipe, load_translation, translated_document
from .yaml import emit


def convert_any(words: Sequence[str]) -> ConvertedFile:
    """The recipe of ``FILE key=value ...`` or of ``--key value ...``, as YAML. Raises
    ``RecipeError``: it is no known program's file, or a key is not supported."""
    if (found := find_translation(words)) is None:
        return convert_file(Path(words[0]), words[1:])
    translation, overrides = found
    load_translation(translation, overrides)  # which rejects what no recipe can have
    document = override(Recipe, translated_document(translation), overrides)
    return ConvertedFile(emit(document.data), list(translation.notes()))
