"""Python files that a recipe names: checked before anything slow, and recorded by their hashes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from .. import schema
from ..recipe.recipe import Recipe
from ..schema.locations import FunctionPath
from ..storage import files
from ..training.rewards import load_function

logger = logging.getLogger(__name__)
NAME = "code.json"  # in a checkpoint: the functions of the recipe, and the hashes of their files


def code_of(recipe: Recipe) -> dict[str, bytes]:
    """The file that records the functions of ``recipe``, if it names some. Raises ``RunError``."""
    found = {path: _hash(path) for path in functions_in(recipe)}
    return {NAME: json.dumps(found, indent=2, sort_keys=True).encode()} if found else {}


def functions_in(section: object) -> Iterator[FunctionPath]:
    """Every function that a section and its variants name."""
    cls: type = type(section)
    for name in schema.settings(cls):
        value = getattr(section, name)
        if isinstance(value, FunctionPath):
            yield value
        elif schema.is_section(value):
            yield from functions_in(value)


def check_code(code: Mapping[str, bytes], folder: Path) -> None:
    """Warn if a function has changed since the checkpoint in ``folder`` was saved."""
    path = folder / NAME
    if NAME not in code or not path.is_file():
        return
    before, now = json.loads(path.read_bytes()), json.loads(code[NAME])
    for name, digest in now.items():
        if before.get(name, digest) != digest:
            logger.warning("%s has changed since %s was saved", name, folder.name)


def _hash(path: FunctionPath) -> str:
    load_function(path)
    return files.digest(path.file.read_bytes())
