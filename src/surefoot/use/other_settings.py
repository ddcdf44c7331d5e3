"""Candidate settings, which change only memory, time and rounding, for ``plan`` and ``bench``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..recipe.recipe import Recipe

SIZE, PACKING = "train.micro_batch_size", "data.packing"
RECOMPUTE, COMPILE = "model.gradient_checkpointing", "model.compile"
_MOST_TENSORS = 8  # processes of tp: beyond those of one machine it is too slow

Changes = Mapping[str, int | bool | str]  # by dotted path


@dataclass(frozen=True)
class SettingsChange:
    """One other setting, and whether it makes the run faster or slower."""

    values: Changes
    recipe: Recipe
    effect: str
    is_faster: bool


def changes(recipe: Recipe, num_processes: int) -> Iterator[SettingsChange]:
    """Every single change: the mesh, activation checkpointing, the micro-batch size."""
    yield from _splits(recipe, num_processes)
    yield from _tensors(recipe, num_processes)
    yield from _pipelines(recipe, num_processes)
    policy = toggled(recipe, RECOMPUTE)
    is_faster = policy == "none"
    effect = "about a fifth faster" if is_faster else "about a fifth slower"
    yield _change(recipe, {RECOMPUTE: policy}, effect, is_faster=is_faster)
    num_data_ranks = num_processes // recipe.parallel.tp // recipe.parallel.pp
    if smaller := resized(recipe, 1, 2, num_data_ranks=num_data_ranks):
        yield _change(recipe, smaller, "more and smaller micro-batches")
    if larger := resized(recipe, 2, 1, num_data_ranks=num_data_ranks):
        yield _change(recipe, larger, "fewer and larger micro-batches", is_faster=True)


def toggled(recipe: Recipe, name: str) -> bool | str:
    """The other value of a setting with two; of recomputation, whether there is any."""
    if name == RECOMPUTE:
        return "full" if recipe.model.gradient_checkpointing == "none" else "none"
    return not value(recipe, name)


def resized(recipe: Recipe, times: int, part: int, *, num_data_ranks: int = 1) -> Changes:
    """A micro-batch ``times`` / ``part`` as large; nothing if that does not divide the batch."""
    train = recipe.train
    size, rest = divmod(train.fixed_micro_batch_size * times, part)
    return {} if rest or train.global_batch_size % (size * num_data_ranks) else {SIZE: size}


def value(recipe: Recipe, name: str) -> int | bool | str:
    """A setting by its dotted path."""
    section, _, setting = name.partition(".")
    found: int | bool | str = getattr(getattr(recipe, section), setting)
    return found


def changed(recipe: Recipe, changes: Changes) -> Recipe:
    """The same with other settings. Those of a section change together: they are checked as one."""
    names: dict[str, dict[str, int | bool | str]] = {}
    for name, new in changes.items():
        section, _, setting = name.partition(".")
        names.setdefault(section, {})[setting] = new
    sections = {name: replace(getattr(recipe, name), **values) for name, values in names.items()}
    return replace(recipe, **sections)


def _splits(recipe: Recipe, num_processes: int) -> Iterator[SettingsChange]:
    """The other ways to divide examples among as many ranks."""
    _, replicate, now, _ = recipe.parallel.axes(num_processes)
    count = replicate * now
    for shard in range(1, count + 1):
        if count % shard or shard == now:
            continue
        replicate = count // shard
        effect = "less communication" if shard < now else "more communication"
        values = {"dp_replicate": replicate, "dp_shard": shard}
        yield _meshed(recipe, values, effect, is_faster=shard < now)


def _tensors(recipe: Recipe, num_processes: int) -> Iterator[SettingsChange]:
    """Twice and half as many ranks that shard every matrix, and sharded tokens as well."""
    pp, replicate, shard, tp = recipe.parallel.axes(num_processes)
    if tp > 1 and pp == 1 and not recipe.parallel.sequence_parallel:
        yield _meshed(recipe, {"sequence_parallel": True}, "as much communication")
    if shard % 2 == 0 and 2 * tp <= _MOST_TENSORS:
        values = {"dp_shard": shard // 2, "tp": 2 * tp}
        yield _meshed(recipe, values, "more communication")
    if tp % 2 == 0 and _divides(recipe, 2 * replicate * shard):
        values = {"dp_shard": 2 * shard, "tp": tp // 2}
        if recipe.parallel.sequence_parallel and tp == 2:
            values |= {"sequence_parallel": False}
        yield _meshed(recipe, values, "less communication", is_faster=True)


def _pipelines(recipe: Recipe, num_processes: int) -> Iterator[SettingsChange]:
    """Of a pipeline, twice and half as many processes that share the layers out."""
    pp, replicate, shard, _ = recipe.parallel.axes(num_processes)
    if pp > 1 and shard % 2 == 0:
        yield _meshed(recipe, {"dp_shard": shard // 2, "pp": 2 * pp}, "waits more")
    if pp % 2 == 0 and _divides(recipe, 2 * replicate * shard):
        values = {"dp_shard": 2 * shard, "pp": pp // 2}
        yield _meshed(recipe, values, "waits less, more communication", is_faster=True)


def _divides(recipe: Recipe, num_data_ranks: int) -> bool:
    """Whether so many ranks divide the examples of a step evenly."""
    train = recipe.train
    return train.global_batch_size % (train.fixed_micro_batch_size * num_data_ranks) == 0


def _meshed(
    recipe: Recipe, values: Changes, effect: str, *, is_faster: bool = False
) -> SettingsChange:
    changes = {f"parallel.{name}": value for name, value in values.items()}
    return _change(recipe, changes, effect, is_faster=is_faster)


def _change(
    recipe: Recipe, values: Changes, effect: str, *, is_faster: bool = False
) -> SettingsChange:
    return SettingsChange(values, changed(recipe, values), effect, is_faster)
