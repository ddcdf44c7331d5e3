"""The files and command lines of other programs as recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import RecipeError
from ..schema import Problem
from .files import SUFFIXES, read_text
from .recipe import IMPORTERS, ConvertedFile, importer_of
from .yaml import parse


def convert(words: Sequence[str], program: str | None = None) -> ConvertedFile | None:
    """The recipe of another program's ``FILE key=value ...`` or ``--key value ...``; None if the
    words are not another program's. ``program`` says whose file it is, if its content does not.
    Raises ``RecipeError``: it cannot be read or converted."""
    if words[0].startswith("--"):
        lines = ((importer, importer.read_words(words)) for importer in IMPORTERS.values())
        return next((importer.convert(*read) for importer, read in lines if read), None)
    path = Path(words[0])
    if program is None and not (path.suffix in SUFFIXES and path.is_file()):
        return None
    document = parse(read_text(path), words[0])
    if program is not None and program not in IMPORTERS:
        program_names = ", ".join(name for name, importer in IMPORTERS.items() if importer.title)
        raise RecipeError(f"--from {program}: expected one of {program_names}")
    importer = IMPORTERS[program] if program is not None else importer_of(document)
    return None if importer is None else importer.convert(document, words[1:])


def unknown(path: Path) -> RecipeError:
    """The error for the file ``path``, which no program is known to have written."""
    document = parse(read_text(path), str(path))
    message = "this is a recipe already; `surefoot recipe show` prints all its settings"
    if not isinstance(document.data, Mapping) or not {"model", "data"} <= document.data.keys():
        titles = ", ".join(each.title for each in IMPORTERS.values() if each.title)
        message = f"this is a file of none of {titles}; --from NAME says whose it is"
    return document.error([Problem((), message)])
