"""Find the folders that a recipe names: beside the recipe file, or in the current folder."""

from __future__ import annotations

import os
from pathlib import Path


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


def locate_model(name: str, base: Path) -> str:
    """A model's folder made absolute; a path that is no folder is not changed: it is a hub id."""
    if not name:
        return name
    found = locate(Path(name), base)
    return str(found) if found.exists() else name
