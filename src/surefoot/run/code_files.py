"""Python files that a recipe names: checked before anything slow, and recorded by their hashes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from .. import schema
from ..errors import RunError
from ..recipe.recipe import Recipe
from ..schema.locations import FunctionPath
from ..storage import files
from ..training.rewards.kinds import FunctionReward
from ..training.rewards.process import RewardProcess
from .from_python.stages import AS_IN_THE_RECIPE, GIVEN, StageParts

logger = logging.getLogger(__name__)
SECONDS = 60.0  # that a file may take to be run
NAME = "code.json"  # in a checkpoint: the functions of the recipe, and the hashes of their files


def code_of(recipe: Recipe, parts: StageParts = AS_IN_THE_RECIPE) -> dict[str, bytes]:
    """The file that records the functions of ``recipe`` and of ``parts``, if there are some. Raises
    ``RunError``."""
    process = RewardProcess()
    found = {str(path): _hash(path, process) for path in functions_in(recipe)} | parts.code()
    process.end()
    return {NAME: json.dumps(found, indent=2, sort_keys=True).encode()} if found else {}


def functions_in(section: object) -> Iterator[FunctionPath]:
    """Every function that a section and its variants name."""
    cls: type = type(section)
    for name in schema.settings(cls):
        found = getattr(section, name)
        for value in found if isinstance(found, tuple) else (found,):
            if isinstance(value, FunctionPath):
                yield value
            elif schema.is_section(value):
                yield from functions_in(value)


def check_code(code: Mapping[str, bytes], folder: Path) -> None:
    """Warn if a function has changed since the checkpoint in ``folder`` was saved. Raises
    ``RunError`` if one that the run was trained with is not given any more."""
    path = folder / NAME
    before = json.loads(path.read_bytes()) if path.is_file() else {}
    now = json.loads(code.get(NAME, b"{}"))
    for role in GIVEN:
        if role in before and role not in now:
            raise RunError(
                f"{folder.name} was trained with a {role} which is missing here; resume it from "
                "Python with the same `parts`"
            )
    for name, digest in now.items():
        if before.get(name, digest) != digest:
            logger.warning("%s has changed since %s was saved", name, folder.name)


def _hash(path: FunctionPath, process: RewardProcess) -> str:
    """Of the file of a function. Raises ``RunError`` if it defines none."""
    process.check(FunctionReward(path=path).task, SECONDS)
    return files.digest(path.file.read_bytes())
