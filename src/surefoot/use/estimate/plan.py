"""The estimate of a run: its length, its memory, and the disk space of its checkpoints; and the
search for settings with which it fits: the most examples per micro-batch, under the policies of
recomputation. ``plan`` and ``micro_batch_size: auto`` ask for that.

Each candidate of the search is a dry run of its peak micro-batch. Memory grows with the size, so a
few of them find the largest one.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch

from ...errors import RecipeError
from ...log import fell_back
from ...model.config import check_alone
from ...model.numerics import PrecisionName
from ...model.section import Recomputation
from ...parallel.world import World, gpu_of
from ...recipe.recipe import MemorySettings, Recipe
from ...recipe.recipe_data import with_batch_sizes
from ...run.code_files import check_functions
from ...run.parts import RunParts
from ...storage.files import parse_json, read_file
from ...storage.memory import free_memory
from ...terminal_text import in_bytes
from ...training.callbacks.metric_files import METRICS
from ._batches import RunLength
from ._dry_run import DryRunModel
from ._memory_model import Memory, MeshShape
from ._rank_memory import (
    Machine,
    PeakPictures,
    PlanBase,
    SharedRows,
    machine_for,
    memory_of,
    mesh_of,
    plan_base,
    recomputes_on,
    rehearsed,
    whole,
)
from ._saving import (
    CheckpointSize,
    disk_needed,
    most_at_once,
    saved_steps,
    size_of_checkpoint,
    snapshot_size,
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
    pictures: PeakPictures | None = None  # of the peak micro-batch
    shared_rows: SharedRows | None = None  # with ``parallel.cp``
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
    # Measured first: what the dry run itself imports and allocates is no part of training.
    imports = 0 if machine.on_gpu else imported()
    check_alone(recipe.model, machine.num_processes)
    num_ranks = mesh_of(recipe.parallel, machine).num_data_ranks
    recipe, note = with_batch_sizes(recipe, num_ranks)
    if note is not None:
        logger.info("%s", note)
    ground = _planned(recipe, machine)
    examples, course = ground.examples, ground.course
    rank_model = ground.build(ground.setting)
    alone = whole(ground) if ground.mesh.tp > 1 else rank_model
    rehearsal = rehearsed(ground, rank_model)
    batch = rehearsal.batch
    num_rows = len(batch.input_ids) if batch.cu_seqlens is None else len(batch.cu_seqlens) - 1
    return Plan(
        machine=machine,
        mesh=ground.mesh,
        precision=ground.precision,
        parameters=alone.network.num_parameters,
        trained_parameters=alone.network.num_trainable,
        trained_at_once=alone.num_at_once,
        examples=len(examples.dataset),
        rows_read=examples.rows_read,
        course=course,
        heaviest=Heaviest(num_rows, batch.input_ids.numel(), batch.num_trained),
        memory=memory_of(ground, rank_model, rehearsal.memory),
        not_known=rehearsal.not_known,
        saving=saving_of(alone, ground),
        tokens_per_second=tokens_per_second or measured_speed(recipe.train.folder),
        pictures=rehearsal.pictures,
        shared_rows=SharedRows.of(ground, rank_model, batch),
        imports=imports,
    )


def _planned(recipe: Recipe, machine: Machine) -> PlanBase:
    check_functions(recipe)  # a function that is missing is an error here, not when the run begins
    return plan_base(RunParts.unopened(recipe), machine)


def imported() -> int:
    """The memory of this process, which has imported what training does, and has no model yet."""
    import psutil

    resident_bytes: int = psutil.Process().memory_info().rss
    return resident_bytes


def saving_of(dry_run: DryRunModel, ground: PlanBase) -> Saving:
    """What the checkpoints of a run take."""
    course, parts = ground.course, ground.parts
    section, train = parts.saves, parts.train
    num_logs = course.steps // train.log_steps if train.log_steps else 0
    size = size_of_checkpoint(dry_run, num_logs=num_logs)
    saves = saved_steps(
        steps=course.steps,
        steps_per_epoch=course.steps_per_epoch,
        save_steps=section.save_steps,
        save_epoch=section.save_epoch,
    )
    evaluates = train.eval_steps or train.eval_minutes or train.eval_epoch
    at_once = most_at_once(saves, section.rule(), (section.keep_best or 1) if evaluates else 0)
    count, is_adapter = ground.machine.num_processes, not parts.saves_base
    copy = snapshot_size(size, count, is_adapter=is_adapter)
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
        lines = read_file(folder / METRICS).decode().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    speeds = [speed for line in lines[-10 * _SPEEDS :] if (speed := _speed(line))]
    return median(speeds[-_SPEEDS:]) if speeds else None


def _speed(line: str) -> float | None:
    try:
        record = parse_json(line)
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
        "pictures": None if plan.pictures is None else vars(plan.pictures),
        "shared_rows": None if plan.shared_rows is None else vars(plan.shared_rows),
        "memory": vars(plan.memory),
        "process": {"imports": plan.imports, "snapshot": plan.snapshot, "total": plan.total},
        "not_known": plan.not_known,
        "checkpoint": {
            "total": saving.size.total,
            **vars(saving.size),
            **{name: value for name, value in vars(saving).items() if name != "size"},
        },
    }


SIZE, RECOMPUTE = "train.micro_batch_size", "model.gradient_checkpointing"
Changes = Mapping[str, int | bool | str]  # settings by dotted path
POLICIES: Sequence[Recomputation] = ("none", "selective", "full", "offload")  # the fastest first
SPARE = 0.1  # of the memory: what allocators reserve, and the error of the estimate
_RUNTIME = 500_000_000  # bytes of a GPU that its runtime takes


class NotKnownError(RecipeError):
    """What fits is not known, for a ``reason``."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"train.micro_batch_size: what fits is not known, because {reason}; set a number, 1 to "
            "begin with"
        )
        self.reason = reason


@dataclass(frozen=True)
class Fit:
    """Settings that fit in a memory."""

    policy: Recomputation
    micro_batch_size: int
    num_bytes: int  # that a process takes at its peak
    sizes: Sequence[int] = ()  # of all micro-batches that divide the examples of a rank

    def holds(self, size: int) -> bool:
        """Whether micro-batches of ``size`` fit, or of the next smaller one that divides."""
        return self.micro_batch_size >= max(each for each in self.sizes if each <= size)

    def is_within(self, limit: int) -> bool:
        """Whether they take at most ``limit`` bytes."""
        return self.num_bytes <= limit

    @property
    def changes(self) -> Changes:
        """The settings by dotted path."""
        return {RECOMPUTE: self.policy, SIZE: self.micro_batch_size}


def changed(recipe: Recipe, changes: Changes) -> Recipe:
    """The same with other settings. Those of a section change together: they are checked as one."""
    names: dict[str, dict[str, int | bool | str]] = {}
    for name, new in changes.items():
        section, _, setting = name.partition(".")
        names.setdefault(section, {})[setting] = new
    sections = {name: replace(getattr(recipe, name), **values) for name, values in names.items()}
    return replace(recipe, **sections)


def fitted(
    recipe: Recipe, device: str | None, memory: int | None
) -> tuple[Recipe, Machine, dict[str, object]]:
    """The recipe with settings that fit in ``memory``, the machine with that much, and what was
    set. Without ``memory``, only what is auto is chosen."""
    machine = machine_for(recipe.parallel, device)
    taken = 0 if machine.on_gpu else imported()
    if memory is None and recipe.is_fitted:
        return recipe, machine, {}
    policies: dict[str, int | bool | str] = {}
    if memory is None and recipe.model.gradient_checkpointing == "auto":
        if machine.capacity is None:
            raise RecipeError(
                "model.gradient_checkpointing: auto depends on the memory of a rank, which is not "
                "that of this machine; name it with --memory"
            )
        try:
            policy = cheapest_policy(recipe, machine, machine.capacity, taken=taken).policy
        except NotKnownError:
            policy = "full"
        policies = {RECOMPUTE: policy}
        recipe = changed(recipe, policies)
        if recipe.is_fitted:
            return recipe, machine, dict(policies)
    if memory is not None:
        machine = replace(machine, capacity=memory)
        fit = fastest_fit(recipe, machine, memory, taken=taken)
    elif machine.capacity is None:
        raise RecipeError(
            "train.micro_batch_size: auto depends on the memory of a rank, which is not that of "
            "this machine; name it with --memory"
        )
    else:
        fit = largest_fit(recipe, machine, machine.capacity, taken=taken)
    if fit is None:
        raise RecipeError(
            f"not even one example per micro-batch fits in {in_bytes(machine.capacity)}, whatever "
            "is recomputed; lower data.cutoff_len, train an adapter (method: lora, "
            "model.quantization_bit: 4), or shard the model (--num-processes with "
            "parallel.dp_shard)"
        )
    chosen = fit.changes if memory is not None else {**policies, SIZE: fit.micro_batch_size}
    return changed(recipe, chosen), machine, dict(chosen)


def choose_settings(recipe: Recipe, world: World) -> MemorySettings:
    """What is auto in ``recipe`` for the ranks of ``world``, with the memory that is free now on
    this machine. Raises ``RecipeError`` if a micro-batch is to be chosen and not even one example
    fits, or nobody can tell."""
    machine = replace(machine_for(recipe.parallel, None), num_processes=world.size)
    free = available(world.num_local_ranks)
    if recipe.model.gradient_checkpointing == "auto":
        recipe = changed(recipe, {RECOMPUTE: _choose_policy(recipe, machine, free)})
    if recipe.train.micro_batch_size == "auto":
        recipe = changed(recipe, {SIZE: _choose_size(recipe, machine, free)})
    return recipe.memory_settings


def _choose_size(recipe: Recipe, machine: Machine, free: int | None) -> int:
    if free is None:
        raise RecipeError(
            "train.micro_batch_size: auto needs to know the free memory, which this system does "
            "not tell; set a number"
        )
    fit = largest_fit(recipe, machine, free)
    if fit is None:
        size = f"{free / 1e9:.3g}GB"
        raise RecipeError(
            f"train.micro_batch_size: auto: not even one example per micro-batch fits in the "
            f"{size} that are free for a rank; `surefoot plan --memory {size}` tries other settings"
        )
    logger.info(
        "train.micro_batch_size: %d (auto: %.3g of %.3g GB per rank, by estimate)",
        fit.micro_batch_size,
        fit.num_bytes / 1e9,
        free / 1e9,
    )
    return fit.micro_batch_size


def _choose_policy(recipe: Recipe, machine: Machine, free: int | None) -> Recomputation:
    """The policy of ``cheapest_policy``; ``full`` where memory or activations are not known."""
    reason = "how much memory is free is not known on this system"
    try:
        fit = None if free is None else cheapest_policy(recipe, machine, free)
    except NotKnownError as error:
        fit, reason = None, error.reason
    if fit is None or free is None:
        what = "model.gradient_checkpointing: full (auto)"
        fell_back(what, reason, "may recompute more than it has to", logging.INFO)
        return "full"
    policy, needed, limit = fit.policy, fit.num_bytes / 1e9, free / 1e9
    if fit.is_within(usable_bytes(machine, free, 0)):
        what = "model.gradient_checkpointing: %s (auto: %.3g of %.3g GB per rank, by estimate)"
        logger.info(what, policy, needed, limit)
    else:
        what = f"model.gradient_checkpointing: {policy} (auto)"
        reason = f"no policy fits with a micro-batch of {fit.micro_batch_size} in the "
        reason += f"{limit:.3g} GB that are free for a rank, less a tenth"
        fell_back(what, reason, f"takes the least memory, {needed:.3g} GB by estimate")
    return policy


def cheapest_policy(recipe: Recipe, machine: Machine, memory: int, *, taken: int = 0) -> Fit:
    """The first policy, the fastest first, with which the recipe's micro-batch fits, or one example
    if its size is auto; the one that takes the least memory if none does. ``memory`` and ``taken``
    are those of ``largest_fit``. Raises ``NotKnownError``."""
    required_size, fits = recipe.train.micro_batch_size, list[Fit]()
    for trial in trials_of(recipe, machine):
        required = 1 if required_size == "auto" else required_size
        size = max(each for each in trial.sizes if each <= required)
        fits.append(Fit(trial.policy, size, trial.peak(size) + taken, trial.sizes))
        if fits[-1].is_within(usable_bytes(machine, memory, taken) + taken):
            return fits[-1]
    return min(fits, key=lambda fit: fit.num_bytes)


def fastest_fit(recipe: Recipe, machine: Machine, memory: int, *, taken: int = 0) -> Fit | None:
    """The first policy with which the recipe's micro-batch fits, or else the one with which the
    most examples do; with the largest micro-batch that fits. None: not even one example does.
    ``memory`` and ``taken`` are those of ``largest_fit``."""
    required_size, fits = recipe.train.micro_batch_size, list[Fit]()
    for policy in policies_on(recipe, machine):  # the fastest first
        fit = Trial.of(recipe, machine, policy).largest(usable_bytes(machine, memory, taken), taken)
        if fit is None:
            continue
        fits.append(fit)
        if fit.holds(1 if required_size == "auto" else required_size):
            break
    return max(fits, key=lambda fit: fit.micro_batch_size, default=None)


def largest_fit(recipe: Recipe, machine: Machine, memory: int, *, taken: int = 0) -> Fit | None:
    """The largest micro-batch of which a rank takes at most ``memory`` bytes, less a tenth, beside
    those that are ``taken``. Raises ``RecipeError`` if activations are not known."""
    trial = Trial.of(recipe, machine, recipe.model.recomputes)
    return trial.largest(usable_bytes(machine, memory, taken), taken)


def policies_on(recipe: Recipe, machine: Machine) -> list[Recomputation]:
    """Those that differ on the machine and go with the recipe."""
    policies = dict.fromkeys(recomputes_on(machine, policy) for policy in POLICIES)
    is_whole = recipe.method.saves_base_model and not recipe.model.compile
    return [each for each in policies if each != "selective" or is_whole]


def trials_of(recipe: Recipe, machine: Machine) -> Iterator[Trial]:
    """The run under each policy that the machine and the method have, the fastest first."""
    return (Trial.of(recipe, machine, policy) for policy in policies_on(recipe, machine))


def usable_bytes(machine: Machine, memory: int, taken: int) -> int:
    """What a run may take of ``memory``, beside what is ``taken``."""
    return int(memory * (1 - SPARE)) - (_RUNTIME if machine.on_gpu else 0) - taken


@dataclass(frozen=True)
class Trial:
    """Dry runs of a run under one policy, with micro-batches of any size."""

    policy: Recomputation
    sizes: Sequence[int]  # that divide the examples of a rank, ascending
    ground: PlanBase
    rank_model: DryRunModel
    snapshot: int  # of a save, in the memory of a CPU
    peaks: dict[int, int] = field(default_factory=dict)  # known ones

    @classmethod
    def of(cls, recipe: Recipe, machine: Machine, policy: Recomputation) -> Trial:
        """The trial of ``policy``. Raises as ``make_plan``."""
        ranks = mesh_of(recipe.parallel, machine).num_data_ranks
        recipe = changed(with_batch_sizes(recipe, ranks)[0], {SIZE: 1, RECOMPUTE: policy})
        per_rank = max(1, recipe.train.global_batch_size // ranks)
        sizes = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
        ground = _planned(recipe, machine)
        rank_model = ground.build(ground.setting)
        snapshot = 0
        if not machine.on_gpu:
            alone = whole(ground) if ground.mesh.tp > 1 else rank_model
            snapshot = saving_of(alone, ground).shared_memory
        return cls(policy, sizes, ground, rank_model, snapshot)

    def peak(self, size: int) -> int:
        """The bytes of a rank with micro-batches of ``size``."""
        if size not in self.peaks:
            self.peaks[size] = self._peak(size)
        return self.peaks[size]

    def largest(self, limit: int, taken: int) -> Fit | None:
        """The most examples that take at most ``limit`` bytes."""
        num_fitting = len(self.sizes)
        if self.peak(self.sizes[-1]) > limit:  # often all fit, which one dry run tells
            num_fitting = bisect_right(self.sizes, limit, key=self.peak)
        if not num_fitting:
            return None
        best = self.sizes[num_fitting - 1]
        return Fit(self.policy, best, self.peak(best) + taken, self.sizes)

    def _peak(self, size: int) -> int:
        ground = self.ground.with_size(size)
        rehearsal = rehearsed(ground, self.rank_model)
        if rehearsal.not_known is not None:
            raise NotKnownError(rehearsal.not_known)
        return memory_of(ground, self.rank_model, rehearsal.memory).peak + self.snapshot


def available(num_local_ranks: int = 1) -> int | None:
    """Bytes that a rank of this machine can allocate now; None if unknown."""
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        return int(torch.cuda.mem_get_info(gpu_of(local, torch.cuda.device_count()))[0])
    free = free_memory()
    return None if free is None else free // num_local_ranks
