"""A checkpoint of Hugging Face's Trainer: its files, and its ``trainer_state.json``.

It is detected by names alone. The Trainer writes it in place without flushing, so it may be
incomplete. A missing file is an error, never a silent fresh start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoint.disk import strict_json, trainer_state
from ...checkpoint.disk.commit import named, step_of
from ...checkpoint.disk.manifest import MANIFEST
from ...checkpoint.disk.manifest import STATE as SKELETON
from ...checkpoint.disk.retention import number
from ...errors import CheckpointError
from ...storage import files

OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
RANDOM, SCALER = "rng_state.pth", "scaler.pt"
STATE = "trainer_state.json"
ARGUMENTS = "training_args.bin"  # a pickled object of theirs; never read, never needed
PICKLES = (OPTIMIZER, SCHEDULER, RANDOM, SCALER)
OURS = (MANIFEST, SKELETON, "recipe.yaml", "optimizer.safetensors")  # in no folder of theirs
# Sharded states of several processes, by the names only they use.
SHARDED = {
    "latest": "DeepSpeed",
    "zero_to_fp32.py": "DeepSpeed",
    "optimizer_0": "FSDP",
    "optimizer.bin": "FSDP",
    "pytorch_model_fsdp_0": "FSDP",
    "pytorch_model_fsdp.bin": "FSDP",
}


def is_trainer_checkpoint(folder: Path) -> bool:
    """Whether ``folder`` is a checkpoint of the Trainer, complete or not. By names alone."""
    if any(files.exists(folder / name) for name in OURS):
        return False
    return any(files.exists(folder / name) for name in (STATE, ARGUMENTS, OPTIMIZER))


def latest_complete(folder: Path) -> Path | None:
    """The Trainer's latest checkpoint in ``folder`` whose save was not interrupted."""
    found = (path for path in named(folder) if is_trainer_checkpoint(path))
    return max((p for p in found if files.exists(p / STATE)), key=step_of, default=None)


def pickles_in(folder: Path) -> list[str]:
    """The pickles that a resume from ``folder`` would read."""
    return [name for name in PICKLES if files.exists(folder / name)]


def refuse_incomplete(folder: Path) -> None:
    """Raise ``CheckpointError`` if ``folder`` lacks what a resume needs."""
    for name, what in SHARDED.items():
        if files.exists(folder / name):
            raise CheckpointError(
                f"{folder}: its {name} is the sharded state of a {what} run, which cannot be "
                f"resumed here; {_from_scratch(folder)}"
            )
    if not files.exists(folder / STATE):
        raise CheckpointError(
            f"{folder}: it has no {STATE}, which the Trainer writes last, so the save was "
            "interrupted; resume from an earlier checkpoint"
        )
    if not files.exists(folder / OPTIMIZER):
        raise CheckpointError(
            f"{folder}: no {OPTIMIZER} (saved with save_only_model?), so Adam's moments are "
            f"missing and the run cannot be resumed; {_from_scratch(folder)}"
        )


def _from_scratch(folder: Path) -> str:
    is_adapter = files.exists(folder / "adapter_config.json")
    return (
        "to start a new run from its weights, with a fresh optimizer, remove checkpoint.resume "
        f"and set model.{'adapter' if is_adapter else 'path'}={folder}"
    )


@dataclass(frozen=True)
class TrainerProgress:
    """The part of ``trainer_state.json`` that a Surefoot run imports."""

    global_step: int
    epoch: float
    max_steps: int
    best_metric: float | None
    best_global_step: int | None
    num_input_tokens_seen: int
    total_flos: float
    log_history: list[dict[str, float]]
    num_worse: int | None  # of EarlyStoppingCallback, if the run had one

    @property
    def train_loss_total(self) -> float:
        """Sum of all losses, from logged means; steps after the last log count as before it."""
        logged = [
            (int(r["step"]), r["loss"])
            for r in self.log_history
            if math.isfinite(r.get("step", math.nan)) and math.isfinite(r.get("loss", math.nan))
        ]
        total, before, loss = 0.0, 0, 0.0
        for step, loss in logged:
            total += loss * max(0, step - before)
            before = step
        return total + loss * max(0, self.global_step - before)


def read_progress(folder: Path) -> TrainerProgress:
    """``trainer_state.json``. Raises ``CheckpointError`` if it is incomplete or of another step."""
    where = folder / STATE
    content = _read(where)
    progress = TrainerProgress(
        global_step=_count(content, "global_step", where),
        epoch=_number(content, "epoch", where),
        max_steps=_count(content, "max_steps", where, 0),
        best_metric=_finite(content.get("best_metric")),
        best_global_step=trainer_state.read(content).best_step,
        num_input_tokens_seen=_count(content, "num_input_tokens_seen", where, 0),
        total_flos=_number(content, "total_flos", where, 0),
        log_history=_records(content.get("log_history") or [], where),
        num_worse=_num_worse(content.get("stateful_callbacks")),
    )
    if step_of(folder) not in (-1, progress.global_step):
        raise CheckpointError(
            f"{where}: it is of step {progress.global_step}, but the folder is {folder.name}: "
            "two saves are mixed in it, or it was renamed; resume from another checkpoint"
        )
    return progress


def _read(where: Path) -> Mapping[str, Any]:
    """The Trainer writes NaN and Infinity, which JSON does not support."""
    with files.raising(CheckpointError), files.open_file(where) as file:
        data = files.read_all(file, strict_json.MAX_BYTES)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: not JSON ({error}): the save was interrupted; resume from an earlier "
            "checkpoint"
        ) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {str(content)[:40]}")
    return content


def _number(
    content: Mapping[str, Any], name: str, where: Path, default: float | None = None
) -> float:
    value = content.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
        raise CheckpointError(f"{where}: {name} must be a number, found {str(value)[:40]!r}")
    return value


def _count(content: Mapping[str, Any], name: str, where: Path, default: float | None = None) -> int:
    value = _number(content, name, where, default)
    if value != int(value):
        raise CheckpointError(f"{where}: {name} must be a whole number, found {value}")
    return int(value)


def _finite(value: object) -> float | None:
    """Before the first finite metric, the Trainer's best one may be an infinity."""
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def _records(found: object, where: Path) -> list[dict[str, float]]:
    """The log, with numbers only."""
    if not isinstance(found, list) or not all(isinstance(record, dict) for record in found):
        raise CheckpointError(f"{where}: log_history must be a list of objects")
    return [{str(k): v for k, v in record.items() if type(v) in (int, float)} for record in found]


def _num_worse(callbacks: object) -> int | None:
    found = callbacks.get("EarlyStoppingCallback") if isinstance(callbacks, dict) else None
    found = found[0] if isinstance(found, list) and found else found
    attributes = found.get("attributes") if isinstance(found, dict) else None
    counter = (
        attributes.get("early_stopping_patience_counter") if isinstance(attributes, dict) else 0
    )
    if found is None:
        return None
    return counter if isinstance(counter, int) else 0
