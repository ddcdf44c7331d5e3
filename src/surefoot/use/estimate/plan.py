"""The estimate of a run: its length, its memory, and the disk space of its checkpoints."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ...model.config import check_alone
from ...model.numerics import PrecisionName
from ...recipe.batch_sizes import with_batch_sizes
from ...recipe.recipe import Recipe
from ...training.callbacks.jsonl import NAME as METRICS
from ._batches import RunLength
from ._dry_run import DryRunModel
from ._memory_model import Memory, MeshShape
from ._saving import (
    CheckpointSize,
    disk_needed,
    most_at_once,
    saved_steps,
    size_of_checkpoint,
    snapshot_size,
)
from .rank_memory import (
    Machine,
    PlanBase,
    first_rank,
    memory_of,
    mesh_of,
    plan_base,
    precision_of,
    rehearsed,
    whole,
)

_SPEEDS = 20  # of the last logs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Heaviest:
    """The micro-batch that takes the most memory."""

    examples: int
    tokens: int  # padding included
    trained: int


@dataclass(frozen=True)
class Saving:
    """The disk space of checkpoints."""

    size: CheckpointSize
    saves: int
    at_once: int  # on the disk, the one being written included
    disk: int
    shared_memory: int  # of a process; 0 if saves are not in the background


@dataclass(frozen=True)
class Plan:
    """The complete estimate of a run."""

    machine: Machine
    mesh: MeshShape
    precision: PrecisionName
    parameters: int
    trained_parameters: int
    trained_at_once: int  # fewer, if the method trains blocks of them in turn
    examples: int
    rows_read: int | None
    course: RunLength
    heaviest: Heaviest
    memory: Memory  # of the first rank
    not_known: str | None  # why activations are not in the memory
    saving: Saving
    tokens_per_second: float | None
    imports: int = 0  # bytes of Python and its packages, where they share a CPU's memory with it

    @property
    def snapshot(self) -> int:
        """Bytes of the copy of a save in the memory of a CPU; a GPU has memory of its own."""
        return 0 if self.machine.on_gpu else self.saving.shared_memory

    @property
    def total(self) -> int:
        """The bytes that a process takes at its peak."""
        return self.memory.peak + self.imports + self.snapshot

    @property
    def seconds(self) -> float | None:
        """How long it trains, without saves and evaluations."""
        return self.course.tokens / self.tokens_per_second if self.tokens_per_second else None


def make_plan(recipe: Recipe, machine: Machine, tokens_per_second: float | None = None) -> Plan:
    """The estimate of ``recipe``; no weights are read. Raises ``RecipeError`` if the ranks do not
    form the mesh, or the method does not fit the model, ``ModelError`` without a configuration or
    tokenizer, ``DataError`` if a dataset is missing or broken, or batches do not divide,
    ``RunError`` if a function that the recipe names cannot be loaded."""
    imports = 0 if machine.on_gpu else imported()
    check_alone(recipe.model, machine.num_processes)
    mesh = mesh_of(recipe, machine)
    recipe, note = with_batch_sizes(recipe, mesh.num_data_ranks)
    if note is not None:
        logger.info("%s", note)
    ground = plan_base(recipe, machine)
    examples, course = ground.examples, ground.course
    rank_model = first_rank(recipe, ground)
    alone = whole(recipe, ground) if mesh.tp > 1 else rank_model
    rehearsal = rehearsed(recipe, ground, rank_model)
    batch = rehearsal.batch
    num_rows = len(batch.input_ids) if batch.cu_seqlens is None else len(batch.cu_seqlens) - 1
    return Plan(
        machine=machine,
        mesh=mesh,
        precision=precision_of(recipe, machine),
        parameters=alone.network.num_parameters,
        trained_parameters=alone.network.num_trainable,
        trained_at_once=alone.num_at_once,
        examples=len(examples.dataset),
        rows_read=examples.rows_read,
        course=course,
        heaviest=Heaviest(num_rows, batch.input_ids.numel(), batch.num_trained),
        memory=memory_of(recipe, machine, rank_model, rehearsal.memory),
        not_known=rehearsal.not_known,
        saving=saving_of(alone, ground),
        tokens_per_second=tokens_per_second or measured_speed(recipe.train.folder),
        imports=imports,
    )


def imported() -> int:
    """The memory of this process, which has imported what training does, and has no model yet."""
    import psutil

    resident_bytes: int = psutil.Process().memory_info().rss
    return resident_bytes


def saving_of(dry_run: DryRunModel, ground: PlanBase) -> Saving:
    """What the checkpoints of a run take."""
    course = ground.course
    section, train = dry_run.recipe.checkpoint, dry_run.recipe.train
    num_logs = course.steps // train.log_steps if train.log_steps else 0
    size = size_of_checkpoint(dry_run, ground.codec, ground.base, num_logs=num_logs)
    saves = saved_steps(
        steps=course.steps,
        steps_per_epoch=course.steps_per_epoch,
        save_steps=section.save_steps,
        save_epoch=section.save_epoch,
    )
    evaluates = train.eval_steps or train.eval_minutes or train.eval_epoch
    at_once = most_at_once(saves, section.rule(), (section.keep_best or 1) if evaluates else 0)
    is_adapter = not dry_run.recipe.method.saves_base_model
    copy = snapshot_size(size, ground.machine.num_processes, is_adapter=is_adapter)
    return Saving(
        size=size,
        saves=len(saves),
        at_once=at_once,
        disk=disk_needed(size, at_once, len(saves), section.rule().most_sharing),
        shared_memory=copy if section.async_save else 0,
    )


def measured_speed(folder: Path) -> float | None:
    """Tokens per second of all ranks, from the last logs of the run in ``folder``, if any."""
    try:
        lines = (folder / METRICS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    speeds = [speed for line in lines[-10 * _SPEEDS :] if (speed := _speed(line))]
    return median(speeds[-_SPEEDS:]) if speeds else None


def _speed(line: str) -> float | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    value = record.get("tokens_per_second") if isinstance(record, dict) else None
    return float(value) if isinstance(value, int | float) and value > 0 else None


def as_data(plan: Plan) -> dict[str, object]:
    """All of it, as ``surefoot plan --json`` prints it."""
    saving = plan.saving
    return {
        "processes": {
            "count": plan.mesh.num_processes,
            **vars(plan.mesh),
            "device": "gpu" if plan.machine.on_gpu else "cpu",
            "precision": plan.precision,
            "capacity": plan.machine.capacity,
        },
        "parameters": plan.parameters,
        "trained_parameters": plan.trained_parameters,
        "trained_at_once": plan.trained_at_once,
        "examples": plan.examples,
        "sampled_rows": plan.rows_read,
        **vars(plan.course),
        "epochs": plan.course.epochs,
        "tokens_per_second": plan.tokens_per_second,
        "seconds": plan.seconds,
        "heaviest_pass": vars(plan.heaviest),
        "memory": vars(plan.memory),
        "process": {"imports": plan.imports, "snapshot": plan.snapshot, "total": plan.total},
        "not_known": plan.not_known,
        "checkpoint": {
            "total": saving.size.total,
            **vars(saving.size),
            **{name: value for name, value in vars(saving).items() if name != "size"},
        },
    }
