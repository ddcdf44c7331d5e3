"""Pinned checkpoints of a run, which no policy deletes: their steps are in ``pinned.json``."""

from __future__ import annotations

import json
from pathlib import Path

from ...errors import CheckpointError
from ...storage import files
from .commit import committed, step_of

NAME = "pinned.json"
_MAX_BYTES = 1 << 20


def pinned(root: Path) -> set[int]:
    """The steps that are pinned. Raises ``CheckpointError`` if the file cannot be read: nothing is
    deleted then."""
    path = root / NAME
    try:
        steps = files.parse_json(files.read_inside(root, NAME, _MAX_BYTES))
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise CheckpointError(f"{files.explain(error)}; repair or delete the file") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); repair or delete it") from None
    if not isinstance(steps, list) or any(type(step) is not int for step in steps):
        raise CheckpointError(f"{path}: expected a list of steps; repair or delete it")
    return set(steps)


def pin(root: Path, step: int, *, is_pinned: bool) -> set[int]:
    """Pin the checkpoint of ``step``, or no longer; returns all steps that are. Raises
    ``CheckpointError`` if there is no such checkpoint."""
    known = {step_of(path) for path in committed(root)}
    if is_pinned and step not in known:
        raise CheckpointError(f"{root}: has no checkpoint-{step} to pin")
    found = pinned(root)
    found = found | {step} if is_pinned else found - {step}
    with files.raising(CheckpointError, "cannot pin"):
        files.write_aside(root / NAME, (json.dumps(sorted(found)) + "\n").encode())
    return found
