"""Settings that name something on this machine: text until the recipe's folder is known.

``located`` makes each absolute, relative to the folder of the recipe or to the current folder, so
that a recipe means the same wherever it is read again.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from ..storage import files

_FUNCTION = re.compile(r".+\.py:[A-Za-z_][A-Za-z0-9_]*")


class ModelPath(str):
    """A model: a folder, or a hub id."""

    __slots__ = ()

    def located(self, base: Path) -> ModelPath:
        """A folder made absolute; what is no folder here stays as written: it is a hub id."""
        if not self:
            return self
        found = locate(Path(self), base)
        return ModelPath(found) if files.exists(found) else self

    @classmethod
    def __get_pydantic_core_schema__(
        cls, _source: Any, _handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Expect text."""
        return core_schema.no_info_after_validator_function(cls, core_schema.str_schema())


class FunctionPath(str):
    """A Python function by its file and name: ``rewards.py:exact_match``."""

    __slots__ = ()

    @property
    def file(self) -> Path:
        """The file that defines it."""
        return Path(self.rpartition(":")[0])

    @property
    def name(self) -> str:
        """Its name in the file."""
        return self.rpartition(":")[2]

    def located(self, base: Path) -> FunctionPath:
        """The same function with its file made absolute."""
        return FunctionPath(f"{locate(self.file, base)}:{self.name}")

    @classmethod
    def __get_pydantic_core_schema__(
        cls, _source: Any, _handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Expect text such as ``rewards.py:exact_match``."""
        pattern = f"^{_FUNCTION.pattern}$"
        return core_schema.no_info_after_validator_function(
            cls, core_schema.str_schema(pattern=pattern)
        )


def locate(path: Path, base: Path) -> Path:
    """``path`` made absolute: in ``base`` if it exists there, else in the current folder if it
    exists there.

    A path that exists nowhere is relative to ``base``, the folder of the recipe.
    """
    path = path.expanduser()
    for folder in (base, Path.cwd()):
        if os.path.lexists(folder / path):
            return _absolute(folder / path)
    return _absolute(base / path)


def _absolute(path: Path) -> Path:
    # not Path.resolve: a link such as models/newest keeps its meaning
    return Path(os.path.abspath(path))  # noqa: PTH100
