"""The files that a recipe names, found beside the recipe file or in the current folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import schema
from ..schema.locations import DatasetReference, FunctionPath, ModelPath


def locate_model(name: str, base: Path) -> str:
    """A model's folder made absolute; a path that is no folder is not changed: it is a hub id."""
    return str(ModelPath(name).located(base))


def with_locations(section: Any, base: Path) -> Any:
    """``section`` with every setting that is a location found, in variants and sections, too."""
    values: dict[str, Any] = {
        name: getattr(section, name)
        for name in schema.settings(type(section))  # type: ignore[arg-type]
    }
    found = {name: _located(value, base) for name, value in values.items()}
    changed = {name: value for name, value in found.items() if value is not values[name]}
    return replace(section, **changed) if changed else section


def _located(value: Any, base: Path) -> Any:
    if isinstance(value, ModelPath | FunctionPath | DatasetReference):
        return value.located(base)
    if isinstance(value, tuple):
        return tuple(_located(item, base) for item in value)
    return with_locations(value, base) if schema.is_section(value) else value
