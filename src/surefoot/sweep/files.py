"""The files of a sweep, for the command that writes them and for whoever only reads.

sweep.json      the search: recipe, ranges, metric, sampler; written once
results.json    every trial with its values and its result; replaced whenever something changes
study.journal   the study, in optuna's own format: which trials there are, and how they ended
recipes/        the recipe of every trial, for ``surefoot train``
trial-0000/     the run of a trial
best.yaml       the recipe of the best complete trial, with a new folder for its run

No optuna and no torch here, so that a reader starts at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..errors import RunError
from ..storage.files import (
    make_folder,
    parse_json,
    raising,
    read_inside,
    write_aside,
)
from ..storage.folder_lock import lock
from ..terminal_text import plain

SPEC = "sweep.json"
RESULTS = "results.json"
STUDY = "study.journal"
BEST = "best.yaml"
LOCK = ".sweep.lock"
METRICS = "metrics.jsonl"
MAX_BYTES = 32 << 20


def name_of(number: int) -> str:
    """The folder of a trial."""
    return f"trial-{number:04d}"


def recipe_path(folder: Path, number: int) -> Path:
    """The recipe of a trial."""
    return folder / "recipes" / f"{name_of(number)}.yaml"


def is_sweep(folder: Path) -> bool:
    """Whether ``folder`` is the folder of a sweep."""
    return (folder / SPEC).is_file()


def read_json(path: Path) -> dict[str, object] | None:
    """The object in a file; None if it is missing, too large or not JSON."""
    try:
        found = plain(parse_json(read_inside(path.parent, path.name, MAX_BYTES)))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Replace a file atomically. Raises ``RunError``."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically. Raises ``RunError``."""
    with raising(RunError, f"sweep: cannot write {path}"):
        make_folder(path.parent)
        write_aside(path, text.encode())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a sweep; raises ``RunError`` if another process has it."""
    taken = f"{folder}: another process runs this sweep; wait for it, or choose another --output"
    with lock(folder, RunError, doing="sweep", taken=taken, name=LOCK):
        yield
