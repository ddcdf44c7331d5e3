"""What layouts of other tools have in common: a model, and perhaps the log of its training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...storage import files
from ..disk import strict_json, trainer_state
from ..sources.weights import Weights
from ..state.roles import MODEL
from .layout import Locations


def model_of(weights: Weights, roles: frozenset[str] | None) -> Locations:
    """The tensors by their full names, if those of models are wanted."""
    if roles is not None and MODEL not in roles:
        return {}
    return {f"{MODEL}/{name}": location for name, location in weights.tensors.items()}


def logged_states(folder: Path) -> Mapping[str, Any]:
    """What the Hugging Face Trainer logged, if it did."""
    if not files.exists(folder / trainer_state.NAME):
        return {}
    return {"trainer_state": trainer_state.load(folder)}


def read_small(folder: Path, name: str) -> bytes | None:
    """The content of a file; None if there is none."""
    if not files.exists(folder / name):
        return None
    with files.open_file(folder / name) as file:
        return files.read_all(file, strict_json.MAX_BYTES)
