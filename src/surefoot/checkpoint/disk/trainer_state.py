"""``trainer_state.json`` of Surefoot and of the Hugging Face Trainer: the log of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from ...errors import CheckpointError
from ...storage import files
from . import strict_json
from .commit import step_of
from .retention import metrics_in, number

NAME = "trainer_state.json"


@dataclass(frozen=True)
class TrainerStateFile:
    """The reliable part of it, whatever the file contains; all empty if there is none."""

    step: int | None = None
    best_step: int | None = None
    history: list[object] = field(default_factory=list)

    def last(self, metric: str) -> float | None:
        """The last logged value of ``metric``."""
        rows: Iterator[Any] = (
            row.get(metric) for row in reversed(self.history) if isinstance(row, dict)
        )
        return number(next((value for value in rows if value is not None), None))

    def at(self, metric: str, step: int | None) -> float | None:
        """The value of ``metric`` that was logged at exactly this step."""
        return None if step is None else metrics_in(self.history, metric).get(step)


def read(raw: Mapping[str, Any]) -> TrainerStateFile:
    """Convert untrusted plain data."""
    history = raw.get("log_history")
    return TrainerStateFile(
        _integer(raw.get("global_step")), _best(raw), history if isinstance(history, list) else []
    )


def load(folder: Path) -> dict[str, Any]:
    """The content of the file in a foreign folder. Raises ``CheckpointError``."""
    where = folder / NAME
    with files.raising(CheckpointError), files.open_inside(folder, NAME) as file:
        return strict_json.parse_object(
            files.read_all(file, strict_json.MAX_BYTES), str(where), allow_nan=True
        )


def finite(value: object) -> object:
    """``value`` with null in place of NaN and infinities, which strict JSON does not support."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value


def _integer(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _best(raw: Mapping[str, Any]) -> int | None:
    """The step of the best checkpoint; older Trainers only store its path."""
    path = raw.get("best_model_checkpoint")
    if (step := _integer(raw.get("best_global_step"))) is not None or not isinstance(path, str):
        return step
    step = step_of(Path(PurePath(path).name))
    return step if step >= 0 else None
