"""``trainer_state.json`` for the Trainer, with a mark that identifies its checkpoint.

The Trainer tells its callbacks that it resumes, but not from where. It does pass on what it read:
so the mark, unique to a save, is among the states of its callbacks.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer_callback import ExportableState

from ..checkpoint.disk.folder import open_checkpoint
from ..checkpoint.disk.trainer_state import finite
from ..errors import CheckpointError

STATE = "trainer_state.json"
_HOLDER, _MARK = "TrainerControl", "surefoot"  # an entry that the Trainer always has


def dump(state: Any, trainer: Trainer, best: Path | None) -> bytes:
    """The file as strict JSON (null for non-finite values), with the callbacks' current states."""
    callbacks: dict[str, Any] = {}
    for callback in _stateful(trainer):
        callbacks.setdefault(type(callback).__name__, []).append(callback.state())
    known = {name: found[0] if len(found) == 1 else found for name, found in callbacks.items()}
    known[_HOLDER] = {**trainer.control.state(), _MARK: secrets.token_hex(8)}
    content = {
        **dataclasses.asdict(state),
        "best_model_checkpoint": None if best is None else str(best),
        "stateful_callbacks": known,
    }
    return (json.dumps(finite(content), indent=2, sort_keys=True) + "\n").encode()


def restore_callbacks(state: Any, trainer: Trainer) -> None:
    """Restore the trainer's callbacks; new ones are not changed."""
    seen: dict[str, int] = {}
    for callback in _stateful(trainer):
        name = type(callback).__name__
        number = seen[name] = seen.get(name, -1) + 1
        found = state.stateful_callbacks.get(name, [])
        found = found if isinstance(found, list) else [found]
        if number < len(found):
            for attribute, value in found[number].get("attributes", {}).items():
                setattr(callback, attribute, value)


def mark_of(callbacks: object) -> str | None:
    """The mark in ``stateful_callbacks``, if Surefoot saved one there."""
    holder = callbacks.get(_HOLDER) if isinstance(callbacks, dict) else None
    mark = holder.get(_MARK) if isinstance(holder, dict) else None
    return mark if isinstance(mark, str) else None


def mark_in(folder: Path) -> str | None:
    """The mark of a Surefoot checkpoint."""
    try:
        content = json.loads(open_checkpoint(folder).small(STATE))
    except (CheckpointError, KeyError, ValueError):
        return None
    return mark_of(content.get("stateful_callbacks"))


def metric(args: Any) -> str:
    """The name under which the log has the metric of the best model."""
    name = args.metric_for_best_model or "loss"
    return name if name.startswith("eval_") else f"eval_{name}"


def _stateful(trainer: Trainer) -> Iterator[Any]:
    return (c for c in trainer.callback_handler.callbacks if isinstance(c, ExportableState))
