"""Find the runs below a folder, and the path that a name from a browser means."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import RunError
from ...recipe.files import RUN_RECIPE
from ...training.callbacks.launches import LOG
from ...training.callbacks.launches import NAME as LAUNCHES

METRICS = "metrics.jsonl"
LOCK = ".lock"
MAX_RUNS = 2000
MAX_FOLDERS = 20_000
MAX_DEPTH = 6
_MAX_NAME = 255  # bytes, as file systems have it
_MAX_MATERIALS = 500  # of each kind
_ROWS = {".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt"}
_NO_ROWS = {"dataset_info.json", "package.json", "package-lock.json", "requirements.txt"}
_NO_ROWS |= {"results.json"}
_SKIPPED = {"node_modules", "__pycache__", "tensorboard", "venv"}
_CHECKPOINT = re.compile(r"checkpoint-\d+(\..*)?")


class OutsideRootError(RunError):
    """A path from the browser that leaves ROOT, or does not exist in it."""


@dataclass(frozen=True)
class FoundRuns:
    """The folders of runs, and whether there may be more than were looked at."""

    folders: list[Path]
    is_cut: bool = False


def find_runs(root: Path) -> FoundRuns:
    """The folders of runs in and below ``root``; symbolic links are not followed."""
    folders: list[Path] = []
    for number, folder in enumerate(_folders(root, 0)):
        if is_run(folder):
            folders.append(folder)
        if number >= MAX_FOLDERS or len(folders) >= MAX_RUNS:
            return FoundRuns(folders, is_cut=True)
    return FoundRuns(folders)


def find_materials(root: Path) -> dict[str, list[str]]:
    """What a new run may begin with: recipes, folders of models, and files of rows in and below
    ``root``, but for those of runs."""
    materials: dict[str, list[str]] = {"recipes": [], "models": [], "data": []}
    for folder in itertools.islice(_folders(root, 0), MAX_FOLDERS):
        if is_run(folder):
            continue
        try:
            with os.scandir(folder) as entries:
                names = sorted(e.name for e in entries if e.is_file(follow_symlinks=False))
        except OSError:  # it vanished, or may not be read
            continue
        if "config.json" in names:
            materials["models"].append(name_of(root, folder))
            continue
        for name in names:
            suffix, path = Path(name).suffix, name_of(root, folder / name)
            if suffix in (".yaml", ".yml") and not name.startswith("."):
                materials["recipes"].append(path)
            elif suffix in _ROWS and name not in _NO_ROWS:
                materials["data"].append(path)
    return {kind: names[:_MAX_MATERIALS] for kind, names in materials.items()}


def is_run(folder: Path) -> bool:
    """Whether ``folder`` has the files of a run, which may have just begun."""
    if (folder / METRICS).is_file() or (folder / LAUNCHES).is_file():
        return True
    is_begun = (folder / LOCK).is_file() or (folder / LOG).is_file()
    return is_begun and (folder / RUN_RECIPE).is_file()


def name_of(root: Path, folder: Path) -> str:
    """The name of a run in the browser: its path below ``root``."""
    return folder.relative_to(root).as_posix()


def typed(root: Path, path: Path) -> str:
    """A path below ``root`` as an argument of a command that is called there, never an option."""
    name = name_of(root, path)
    return f"./{name}" if name.startswith("-") else name


def below(root: Path, name: str) -> Path:
    """The path that ``name`` means in or below ``root``, whether it exists or not. Raises
    ``OutsideRootError``."""
    if "\0" in name or any(len(part) > _MAX_NAME for part in name.split("/")):
        raise OutsideRootError("this is not a path")
    path = Path(os.path.realpath(root / name))
    # After links are followed: one below ROOT may lead out of it.
    if not path.is_relative_to(root):
        raise OutsideRootError(f"{name}: is outside of {root}, the folder of this board")
    return path


def inside(root: Path, name: str) -> Path:
    """The existing path that ``name`` means below ``root``. Raises ``OutsideRootError``."""
    path = below(root, name)
    if not path.exists():
        raise OutsideRootError(f"{name}: does not exist in {root} (any more)")
    return path


def run_inside(root: Path, name: str) -> Path:
    """The folder of the run ``name``. Raises ``OutsideRootError``."""
    path = inside(root, name)
    if not path.is_dir() or not is_run(path):
        raise OutsideRootError(f"{name}: is not the folder of a run (any more)")
    return path


def new_inside(root: Path, name: str) -> Path:
    """A path below ``root`` that does not exist yet. Raises ``OutsideRootError``."""
    path = below(root, name)
    if path == root or path.exists():
        raise OutsideRootError(f"{name}: exists already; choose another name")
    return path


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    yield folder
    # A run may be ROOT itself, and have others below it; in other runs there are none.
    if depth == MAX_DEPTH or (depth and is_run(folder)):
        return
    try:
        with os.scandir(folder) as entries:
            below = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
    except OSError:  # it vanished, or may not be read
        return
    for name in below:
        if not (name.startswith(".") or name in _SKIPPED or _CHECKPOINT.fullmatch(name)):
            yield from _folders(folder / name, depth + 1)
