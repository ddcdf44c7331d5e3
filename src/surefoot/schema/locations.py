"""Settings that name something on this machine: text until the recipe's folder is known.

``located`` makes each absolute, relative to the folder of the recipe or to the current folder, so
that a recipe means the same wherever it is read again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from glob import has_magic
from pathlib import Path
from typing import Any, ClassVar

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from ..storage import files
from ..storage.remote import is_address

DATA_FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt", ".arrow")


class _Location(str):
    """Text that pydantic reads as text of a ``pattern``."""

    __slots__ = ()
    pattern: ClassVar[str | None] = None

    @classmethod
    def __get_pydantic_core_schema__(
        cls, _source: Any, _handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Expect text."""
        text = core_schema.str_schema(pattern=cls.pattern)
        return core_schema.no_info_after_validator_function(cls, text)


class ModelPath(_Location):
    """A model: a folder, or a hub id."""

    __slots__ = ()

    def located(self, base: Path) -> ModelPath:
        """A folder made absolute; what is no folder here stays as written: it is a hub id."""
        if not self:
            return self
        folder = locate(Path(self), base)
        return ModelPath(folder) if files.exists(folder) else self


class FunctionPath(_Location):
    """A Python function by its file and name: ``rewards.py:exact_match``."""

    __slots__ = ()
    pattern = r"^.+\.py:[A-Za-z_][A-Za-z0-9_]*$"

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


class DatasetReference(str):
    """A dataset by its short name: one of ``dataset_info.json``, a file or folder, a hub id, or an
    entry in the recipe itself.

    ``source`` is what the recipe says. References with one name are equal only if they mean the
    same.
    """

    __slots__ = ("source",)
    source: str | Mapping[str, object]

    def __new__(
        cls, name: str, source: str | Mapping[str, object] | None = None
    ) -> DatasetReference:
        """``name`` alone is the source, too."""
        reference = super().__new__(cls, name)
        reference.source = name if source is None else source
        return reference

    @classmethod
    def of(cls, source: object) -> DatasetReference:
        """What a recipe says, as a reference. Raises ``ValueError``: neither text nor an entry."""
        if isinstance(source, DatasetReference):
            return source
        if isinstance(source, str) and source:
            is_path = source[0] in "./~" or Path(source).suffix.lower() in DATA_FILES
            return cls(_last_part(source) if is_path else source, source)
        if not isinstance(source, Mapping):
            raise ValueError(f"expected a name, a file, a hub id or an entry, got {source!r}")
        for key in ("name", "file_name", "cloud_file_name", "hf_hub_url", "ms_hub_url"):
            if isinstance(text := source.get(key), str) and text:
                return cls(_last_part(text) if key.endswith("file_name") else text, source)
        raise ValueError(
            "an entry needs a file_name, hf_hub_url or ms_hub_url; rows themselves are given to "
            "surefoot.train as its train_dataset"
        )

    def located(self, base: Path) -> DatasetReference:
        """The same with an absolute path, if it is a file or folder that exists. A word without a
        slash and a suffix is never a path: it is a name of ``dataset_info.json``."""
        if not isinstance(self.source, str):
            file_name = self.source.get("file_name")
            if not isinstance(file_name, str) or is_address(file_name):
                return self
            return DatasetReference(
                self, {**self.source, "file_name": str(locate(Path(file_name), base))}
            )
        path = Path(self.source)
        if is_address(self.source):
            return self
        if "/" not in self.source and path.suffix.lower() not in DATA_FILES:
            return self
        absolute = locate(path, base)
        is_here = files.exists(absolute) or bool(matches(absolute))
        return DatasetReference(absolute.name, str(absolute)) if is_here else self

    def __eq__(self, other: object) -> bool:
        is_reference = isinstance(other, DatasetReference)
        return str.__eq__(self, other) is True and (
            not is_reference or self.source == other.source  # type: ignore[attr-defined]
        )

    # str has a __ne__ of its own, which does not ask __eq__; and a class
    # with __eq__ alone has no hash.
    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return str.__hash__(self)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, _source: Any, _handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Expect text or an entry."""
        return core_schema.no_info_plain_validator_function(cls.of)


def _last_part(path: str) -> str:
    return Path(path).name or path


def matches(path: Path) -> list[Path]:
    """The files that a path with a pattern means, such as ``rows-*.jsonl``, by their names; none
    for a path without one."""
    if not has_magic(str(path)):
        return []
    anchor = Path(path.anchor)
    try:
        paths = anchor.glob(str(path.relative_to(anchor)))
        return sorted(each for each in paths if each.is_file())
    except (ValueError, NotImplementedError):  # not a pattern, such as a**
        return []


def locate(path: Path, base: Path) -> Path:
    """``path`` made absolute: in ``base`` if it exists there, else in the current folder if it
    exists there.

    A path that exists nowhere is relative to ``base``, the folder of the recipe.
    """
    path = path.expanduser()
    for folder in (base, Path.cwd()):
        if os.path.lexists(folder / path) or matches(_absolute(folder / path)):
            return _absolute(folder / path)
    return _absolute(base / path)


def _absolute(path: Path) -> Path:
    # not Path.resolve: a link such as models/newest keeps its meaning
    return Path(os.path.abspath(path))  # noqa: PTH100
