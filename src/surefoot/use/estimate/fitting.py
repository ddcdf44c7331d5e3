"""The search for settings that fit in a given memory: the most examples per micro-batch, under the
policies of recomputation. ``plan`` and ``micro_batch_size: auto`` ask it.

Each candidate is a dry run of its peak micro-batch. Memory grows with the size, so a few of them
find the largest one.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...errors import RecipeError
from ...model.section import Recomputation
from ...parallel.world import World
from ...recipe.batch_sizes import with_batch_sizes
from ...recipe.recipe import Recipe
from ...storage.memory import free_memory
from ._dry_run import DryRunModel
from .plan import saving_of
from .rank_memory import (
    Machine,
    PlanBase,
    first_rank,
    machine_for,
    memory_of,
    mesh_of,
    plan_base,
    recomputes_on,
    rehearsed,
    whole,
)

logger = logging.getLogger(__name__)
SIZE, RECOMPUTE = "train.micro_batch_size", "model.gradient_checkpointing"
Changes = Mapping[str, int | bool | str]  # settings by dotted path
POLICIES: Sequence[Recomputation] = ("none", "selective", "full", "offload")  # the fastest first
SPARE = 0.1  # of the memory: what allocators reserve, and the error of the estimate
_RUNTIME = 500_000_000  # bytes of a GPU that its runtime takes


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


def choose_micro_batch_size(recipe: Recipe, world: World) -> int:
    """The number that ``train.micro_batch_size: auto`` is for the ranks of ``world``, with the
    memory that is free now on this machine. Raises ``RecipeError`` if not even one example fits, or
    nobody can tell."""
    machine = replace(machine_for(recipe, None), num_processes=world.size)
    free = available(world.num_local_ranks)
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


def fastest_fit(recipe: Recipe, machine: Machine, memory: int, *, taken: int = 0) -> Fit | None:
    """The first policy with which the recipe's micro-batch fits, or else the one with which the
    most examples do; with the largest micro-batch that fits. None: not even one example does.
    ``memory`` and ``taken`` are those of ``largest_fit``."""
    required_size, fits = recipe.train.micro_batch_size, list[Fit]()
    for policy in _policies(recipe, machine):  # the fastest first
        fit = _Trial.of(recipe, machine, policy).largest(_limit(machine, memory, taken), taken)
        if fit is None:
            continue
        fits.append(fit)
        if fit.holds(1 if required_size == "auto" else required_size):
            break
    return max(fits, key=lambda fit: fit.micro_batch_size, default=None)


def largest_fit(recipe: Recipe, machine: Machine, memory: int, *, taken: int = 0) -> Fit | None:
    """The largest micro-batch of which a rank takes at most ``memory`` bytes, less a tenth, beside
    those that are ``taken``. Raises ``RecipeError`` if activations are not known."""
    trial = _Trial.of(recipe, machine, recipe.model.gradient_checkpointing)
    return trial.largest(_limit(machine, memory, taken), taken)


def _policies(recipe: Recipe, machine: Machine) -> list[Recomputation]:
    """Those that differ on the machine and go with the recipe."""
    policies = dict.fromkeys(recomputes_on(machine, policy) for policy in POLICIES)
    is_whole = recipe.method.saves_base_model and not recipe.model.compile
    return [each for each in policies if each != "selective" or is_whole]


def _limit(machine: Machine, memory: int, taken: int) -> int:
    return int(memory * (1 - SPARE)) - (_RUNTIME if machine.on_gpu else 0) - taken


@dataclass(frozen=True)
class _Trial:
    """Dry runs of a recipe under one policy, with micro-batches of any size."""

    recipe: Recipe
    sizes: Sequence[int]  # that divide the examples of a rank, ascending
    ground: PlanBase
    rank_model: DryRunModel
    snapshot: int  # of a save, in the memory of a CPU
    peaks: dict[int, int] = field(default_factory=dict)  # known ones

    @classmethod
    def of(cls, recipe: Recipe, machine: Machine, policy: Recomputation) -> _Trial:
        """The trial of ``policy``. Raises as ``make_plan``."""
        ranks = mesh_of(recipe, machine).num_data_ranks
        recipe = changed(with_batch_sizes(recipe, ranks)[0], {SIZE: 1, RECOMPUTE: policy})
        per_rank = max(1, recipe.train.global_batch_size // ranks)
        sizes = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
        ground = plan_base(recipe, machine)
        rank_model = first_rank(recipe, ground)
        snapshot = 0
        if not machine.on_gpu:
            alone = whole(recipe, ground) if recipe.parallel.tp > 1 else rank_model
            snapshot = saving_of(alone, ground).shared_memory
        return cls(recipe, sizes, ground, rank_model, snapshot)

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
        policy = self.recipe.model.gradient_checkpointing
        return Fit(policy, best, self.peak(best) + taken, self.sizes)

    def _peak(self, size: int) -> int:
        recipe, machine = changed(self.recipe, {SIZE: size}), self.ground.machine
        rehearsal = rehearsed(recipe, self.ground, self.rank_model)
        if rehearsal.not_known is not None:
            raise RecipeError(
                f"train.micro_batch_size: what fits is not known, because {rehearsal.not_known}; "
                "set a number, 1 to begin with"
            )
        return memory_of(recipe, machine, self.rank_model, rehearsal.memory).peak + self.snapshot


def available(num_local_ranks: int = 1) -> int | None:
    """Bytes that a rank of this machine can allocate now; None if unknown."""
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        return int(torch.cuda.mem_get_info(local)[0])
    free = free_memory()
    return None if free is None else free // num_local_ranks
