"""The plan of a run: how long it is, what it takes, and what would take less or go faster."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from ..batch import Batch
from ..build import build_codec
from ..callbacks.jsonl import NAME as METRICS
from ..data.chat import Codec
from ..data.dataset import EncodedDataset
from ..data.mix import Index
from ..errors import RecipeError
from ..model.load import resolve
from ..recipe.recipe import Recipe
from ..training.precision import PrecisionName
from .batches import Course, course_of, heaviest, loader_of, trained_counts
from .changes import changes
from .examples import examples_of
from .memory import Memory, Mesh, Pass, Snapshot, Weight, memory
from .rehearsal import (
    NotRehearsedError,
    Setting,
    Skeleton,
    build,
    describe,
    held_dtype,
    rehearse,
)
from .saving import size_of_checkpoint
from .size import CheckpointSize, disk_needed, most_at_once, saved_steps, snapshot_size

NOTHING = Pass(Snapshot(0, 0, 0), Snapshot(0, 0, 0), 0, 0)
_SPEEDS = 20  # of the last logs


@dataclass(frozen=True)
class Machine:
    """Where the run is to be."""

    num_processes: int
    on_gpu: bool
    capacity: int | None = None  # bytes that a process can have; None: not known


@dataclass(frozen=True)
class Heaviest:
    """The micro-batch that takes the most memory."""

    examples: int
    tokens: int  # padding included
    trained: int


@dataclass(frozen=True)
class Option:
    """The same run with another setting."""

    changes: Mapping[str, object]  # by dotted path
    memory: Memory
    effect: str  # beside memory


@dataclass(frozen=True)
class Saving:
    """What checkpoints take."""

    size: CheckpointSize
    saves: int
    at_once: int  # on the disk, the one being written included
    disk: int
    shared_memory: int  # of a process; 0 if saves are not in the background


@dataclass(frozen=True)
class Plan:
    """Everything that is known before a run."""

    machine: Machine
    mesh: Mesh
    precision: PrecisionName
    parameters: int
    trained_parameters: int
    examples: int
    rows_read: int | None
    course: Course
    heaviest: Heaviest
    memory: Memory
    not_known: str | None  # why activations are not in the memory
    saving: Saving
    tokens_per_second: float | None
    options: tuple[Option, ...]

    @property
    def seconds(self) -> float | None:
        """How long it trains, saves and evaluations not counted."""
        return self.course.tokens / self.tokens_per_second if self.tokens_per_second else None


def make_plan(recipe: Recipe, machine: Machine, tokens_per_second: float | None = None) -> Plan:
    """The plan of ``recipe``; no weights are read.

    Raises:
        RecipeError: the processes do not make the mesh, or the method does not fit the model.
        ModelError: no configuration or tokenizer.
        DataError: a dataset is missing or broken, or batches do not divide.
    """
    base = resolve(recipe.model, weights=False)
    codec = build_codec(recipe, base)
    mesh = _mesh(recipe, machine)
    examples = examples_of(recipe, codec)
    lengths, trained = examples.dataset.lengths, trained_counts(examples.dataset)
    loader = loader_of(recipe, examples.dataset, mesh.num_data_ranks)
    course = course_of(recipe, loader, lengths, trained)
    ground = _Ground(base, codec, machine, examples.dataset, lengths, trained, course.steps)
    alone = replace(_setting(recipe, machine), tp=1, sequence_parallel=False)
    whole = build(recipe, base, codec.tokenizer, alone)
    skeleton = _skeleton(recipe, ground) if mesh.tp > 1 else whole
    weights = describe(skeleton)
    as_run = None if _gathers_bf16(recipe, machine) else skeleton
    batch, passed, not_known = _rehearsed(recipe, ground, skeleton=as_run)
    options = _options(recipe, ground, weights, (batch, passed)) if not_known is None else ()
    sizes = [(p.numel(), p.requires_grad) for p in whole.model.parameters()]
    return Plan(
        machine=machine,
        mesh=mesh,
        precision=_precision(recipe, machine),
        parameters=sum(size for size, _ in sizes),
        trained_parameters=sum(size for size, is_trained in sizes if is_trained),
        examples=len(examples.dataset),
        rows_read=examples.rows_read,
        course=course,
        heaviest=Heaviest(_num_examples(batch), batch.input_ids.numel(), batch.num_trained),
        memory=_memory(recipe, machine, weights, passed),
        not_known=not_known,
        saving=_saving(whole, codec, base, course, machine),
        tokens_per_second=tokens_per_second or measured_speed(recipe.train.folder),
        options=tuple(options),
    )


@dataclass(frozen=True)
class _Ground:
    """What the recipe and its variants have in common."""

    base: Path
    codec: Codec
    machine: Machine
    dataset: EncodedDataset
    lengths: Index
    trained: Index
    steps: int


def _mesh(recipe: Recipe, machine: Machine) -> Mesh:
    try:
        pp, replicate, shard, tp = recipe.parallel.axes(machine.num_processes)
    except ValueError as error:
        raise RecipeError(
            f"parallel: {error}; change them, or plan for as many with --num-processes"
        ) from None
    if pp > 1:
        raise RecipeError(
            "parallel.pp: pipelines cannot be planned yet; plan with parallel.pp=1 for tokens and "
            "checkpoints, and divide the memory of the layers by pp"
        )
    return Mesh(replicate, shard, recipe.parallel.reshard_after_forward, tp)


def _precision(recipe: Recipe, machine: Machine) -> PrecisionName:
    chosen = recipe.train.precision
    if chosen == "auto":
        return "bf16" if machine.on_gpu else "fp32"
    return chosen


def _setting(recipe: Recipe, machine: Machine) -> Setting:
    """How the weights are held."""
    return Setting(
        _precision(recipe, machine),
        held_dtype(recipe, on_gpu=machine.on_gpu),
        recomputes=recipe.model.gradient_checkpointing,
        tp=recipe.parallel.tp,
        sequence_parallel=recipe.parallel.sequence_parallel,
    )


def _skeleton(recipe: Recipe, ground: _Ground) -> Skeleton:
    """The model as a process holds it."""
    return build(recipe, ground.base, ground.codec.tokenizer, _setting(recipe, ground.machine))


def _gathers_bf16(recipe: Recipe, machine: Machine) -> bool:
    return machine.num_processes > 1 and _precision(recipe, machine) == "bf16"


def _rehearsed(
    recipe: Recipe,
    ground: _Ground,
    logit_weight: float | None = None,
    skeleton: Skeleton | None = None,
) -> tuple[Batch, Pass, str | None]:
    """The heaviest micro-batch and what it takes, or why that is not known.

    What is heaviest depends on what a trained position takes as against a token; where that is not
    known yet, the micro-batch with the most tokens tells.
    """
    machine = ground.machine
    setting = _setting(recipe, machine)
    if _gathers_bf16(recipe, machine):
        setting = replace(setting, gathered=torch.bfloat16)
    batch = _batch(recipe, ground, logit_weight or 0.0)
    try:
        skeleton = skeleton or build(recipe, ground.base, ground.codec.tokenizer, setting)
        passed = rehearse(skeleton, batch)
        if logit_weight is None:
            other = _batch(recipe, ground, _logit_weight(batch, passed))
            if not torch.equal(other.input_ids, batch.input_ids):
                batch, passed = max(
                    ((batch, passed), (other, rehearse(skeleton, other))),
                    key=lambda pair: pair[1].at_peak.total,
                )
    except NotRehearsedError as error:
        return batch, NOTHING, str(error)
    return batch, passed, None


def _batch(recipe: Recipe, ground: _Ground, logit_weight: float) -> Batch:
    loader = loader_of(recipe, ground.dataset, _mesh(recipe, ground.machine).num_data_ranks)
    packing = recipe.data.packing
    items = heaviest(
        loader,
        ground.steps,
        ground.lengths,
        ground.trained,
        packing=packing,
        logit_weight=logit_weight,
    )
    features = [ground.dataset[int(item)] for item in items]
    return recipe.stage.collate(features, packing=packing)


def _logit_weight(batch: Batch, passed: Pass) -> float:
    """Bytes of a trained position as against those of a token."""
    by_token = max(1, passed.at_peak.activations) / batch.input_ids.numel()
    return passed.at_peak.logits / max(1, batch.num_trained) / by_token


def _num_examples(batch: Batch) -> int:
    return len(batch.input_ids) if batch.cu_seqlens is None else len(batch.cu_seqlens) - 1


def _memory(recipe: Recipe, machine: Machine, weights: Sequence[Weight], passed: Pass) -> Memory:
    mesh = _mesh(recipe, machine)
    per_pass = recipe.train.micro_batch_size * mesh.num_data_ranks
    return memory(
        weights,
        passed,
        mesh,
        compute_size=2 if _gathers_bf16(recipe, machine) else 0,
        accumulates=recipe.train.global_batch_size > per_pass,
    )


def _saving(
    skeleton: Skeleton, codec: Codec, base: Path, course: Course, machine: Machine
) -> Saving:
    section, train = skeleton.recipe.checkpoint, skeleton.recipe.train
    num_logs = course.steps // train.log_steps if train.log_steps else 0
    size = size_of_checkpoint(skeleton, codec, base, num_logs=num_logs)
    saves = saved_steps(
        steps=course.steps,
        steps_per_epoch=course.steps_per_epoch,
        save_steps=section.save_steps,
        save_epoch=section.save_epoch,
    )
    evaluates = train.eval_steps or train.eval_minutes or train.eval_epoch
    at_once = most_at_once(saves, section.rule(), (section.keep_best or 1) if evaluates else 0)
    is_adapter = skeleton.recipe.method.kind == "adapter"
    copy = snapshot_size(size, machine.num_processes, is_adapter=is_adapter)
    return Saving(
        size=size,
        saves=len(saves),
        at_once=at_once,
        disk=disk_needed(size, at_once),
        shared_memory=copy if section.async_save else 0,
    )


def measured_speed(folder: Path) -> float | None:
    """Tokens a second of all processes, from the last logs of the run in ``folder``, if there are
    any."""
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


# --- other settings ----------------------------------------------------------------------------


def _options(
    recipe: Recipe, ground: _Ground, weights: Sequence[Weight], known: tuple[Batch, Pass]
) -> list[Option]:
    """What would take less memory, or go faster and still fit; least memory first."""
    now = _memory(recipe, ground.machine, weights, known[1]).peak
    weight, found = _logit_weight(*known), []
    for change in changes(recipe, ground.machine.num_processes):
        try:
            takes = _changed(recipe, change.recipe, ground, weights, (weight, known[1]))
        except RecipeError:  # an architecture that tp cannot cut, or not so far
            continue
        if takes is None:
            continue
        capacity = ground.machine.capacity
        is_better = takes.peak <= (capacity or takes.peak) if change.is_faster else True
        if is_better and (change.is_faster or takes.peak < now):
            found.append(Option(change.values, takes, change.effect))
    return sorted(found, key=lambda option: option.memory.peak)


def _changed(
    recipe: Recipe,
    other: Recipe,
    ground: _Ground,
    weights: Sequence[Weight],
    known: tuple[float, Pass],
) -> Memory | None:
    """What ``other`` takes, if that is known; ``weights`` and the pass that is ``known`` are those
    of ``recipe``."""
    weight, passed = known
    is_cut_alike = _cuts(other) == _cuts(recipe)
    if not is_cut_alike:
        weights = describe(_skeleton(other, ground))
    if not is_cut_alike or other.parallel == recipe.parallel:
        _, passed, not_known = _rehearsed(other, ground, weight)
        if not_known:
            return None
    return _memory(other, ground.machine, weights, passed)


def _cuts(recipe: Recipe) -> tuple[int, bool]:
    return recipe.parallel.tp, recipe.parallel.sequence_parallel
