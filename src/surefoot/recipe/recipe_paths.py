"""The files that a recipe names, found beside the recipe file or in the current folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import schema
from ..schema import Keys
from ..schema.locations import DatasetReference, FilePath, FunctionPath, ModelPath
from .document import Document

BaseOf = Callable[[Keys], Path]  # the folder that the path in a setting is relative to


def bases(document: Document, base: Path) -> BaseOf:
    """``base``, the folder of the recipe, for what the recipe says; the current folder for what an
    override says, so that a shell completes the path that is meant."""
    return lambda path: Path.cwd() if path in document.overridden else base


def with_locations(section: Any, base_of: BaseOf, path: Keys = ()) -> Any:
    """``section`` with every setting that is a location found, in variants and sections, too."""
    changed = {}
    cls: type = type(section)
    for name, setting in schema.settings(cls).items():
        value, here = getattr(section, name), (*path, name)
        if setting.choices is not None:
            here = (*here, schema.variant_name(setting.choices, value))
        found = _located(value, base_of, here)
        if found is not value:
            changed[name] = found
    return replace(section, **changed) if changed else section


def _located(value: Any, base_of: BaseOf, path: Keys) -> Any:
    if isinstance(value, ModelPath | FunctionPath | FilePath | DatasetReference):
        return value.located(base_of(path))
    if isinstance(value, tuple):  # set as one, with all below
        return tuple(_located(item, lambda _: base_of(path), path) for item in value)
    return with_locations(value, base_of, path) if schema.is_section(value) else value
