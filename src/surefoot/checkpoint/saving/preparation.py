"""Save a dict of states as one checkpoint folder, atomically.

In a joint save each rank sends the boxes of its tensors, and all compute the same plan of who
writes which. They send them again only if they have changed since the last save; otherwise a digest
of a few bytes is enough.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ...parallel.sharding import Box
from ...storage import files
from ..disk import strict_json
from ..disk._bytes import block_hashes, describe, write_box, write_file, write_tensor
from ..disk.commit import new_nonce
from ..disk.grid import RANK_FOLDER, Grid
from ..disk.manifest import MANIFEST, MAX_SMALL, STATE, Kind, Layout, is_plain_name
from ..disk.tensorfile import FilePlan, num_bytes, plan_save
from ..disk.tensorfile import Tensors as Described
from ..state.roles import MODEL, OPTIMIZER, FileRole, ShardedState, Stateful, trained_names
from ..state.roles import STATE as STATE_ROLE
from ..state.states import LocalBox, adopted, local_box_of, split
from ._balancing import Holding, LocalTensor, shared_out
from ._grid_plan import are_alike, merged, split_rules
from ._writing import Job, Shard, WriteShare, write

LIBRARIES = ("surefoot", "torch", "transformers", "peft", "safetensors")
MOST_WITH_PIECES = 64  # ranks whose boxes are all exchanged, and listed in the manifest
WORTH_SHARING = 0.1  # of the weights' bytes


Tensors = Mapping[str, torch.Tensor]
ByRole = Mapping[str, Mapping[str, LocalBox]]  # role -> name -> what is here of it


Exchange = Callable[[Any], list[Any]]  # what every process has passed to it, in order of rank
Broadcast = Callable[[Any], Any]  # what rank 0 has passed to it


@dataclass(frozen=True)
class SavePlan:
    """The plan that all ranks have computed alike."""

    tensors: Mapping[str, Described]  # by role: the type and whole shape of each, of all processes
    mine: Mapping[str, Mapping[str, Box]]  # by role and name: what this process writes
    optimizers: Mapping[str, Mapping[str, Any]]  # by role: states without tensors, of all processes
    grid: Grid | None = None  # by which ``mine`` follows, apart from tensors without a rule


@dataclass(frozen=True)
class WriterGroup:
    """The ranks of a joint save, as one of them sees them, and how they communicate."""

    layout: Layout = "full"
    rank: int = 0
    size: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    exchange: Exchange = lambda value: [value]
    from_first: Broadcast = lambda value: value  # waits for rank 0 as long as a save takes
    of_stages: Exchange = lambda value: [value]  # the same of one rank of each pipeline stage
    is_apart: bool = False  # whether they have no folder in common, and so no files either
    _plans: dict[tuple[str, ...], SavePlan] = field(
        default_factory=dict, repr=False, compare=False
    )  # the last one, by the digests of what each rank has

    def agree(
        self, holding: Holding, optimizers: Mapping[str, Mapping[str, Any]], parent: str | None
    ) -> tuple[str, str | None, SavePlan]:
        """Exchange which boxes each rank has; a collective call. Raises on every rank if these do
        not fit together.

        ``optimizers`` are states without tensors, in a pipeline of some parameters only. Returns
        rank 0's nonce of the temporary folder, its ``parent``, and the plan.
        """
        if uses_grid(self):
            return self._agree_on_rules(holding, optimizers, parent)
        own_state = holding, optimizers
        answers = self.exchange((files.digest(repr(own_state).encode()), new_nonce(), parent))
        digests = tuple(own_digest for own_digest, _, _ in answers)
        if digests not in self._plans:
            plan = _plan(self.exchange(own_state), self.rank)
            self._plans.clear()
            self._plans[digests] = plan
        _, nonce, parent = answers[0]
        return nonce, parent, self._plans[digests]

    def _agree_on_rules(
        self, holding: Holding, optimizers: Mapping[str, Mapping[str, Any]], parent: str | None
    ) -> tuple[str, str | None, SavePlan]:
        """The same by digests of rules. What has no rule is exchanged, if any rank has such."""
        rules, rest = split_rules(holding, self.mesh, self.rank)
        own, nothing = (files.digest(repr(part).encode()) for part in (rest, {}))
        answers = self.exchange((files.digest(repr(rules).encode()), own, new_nonce(), parent))
        _, _, nonce, parent = answers[0]
        if not are_alike([of_rules for of_rules, *_ in answers], self.mesh):
            return nonce, parent, _plan(self.exchange((holding, optimizers)), self.rank)
        digests = tuple(of_rest for _, of_rest, *_ in answers)
        if digests not in self._plans:
            is_empty = all(of_rest == nothing for of_rest in digests)
            of_ranks = [({}, {})] * self.size if is_empty else self.exchange((rest, {}))
            self._plans.clear()
            self._plans[digests] = _plan(of_ranks, self.rank)
        of_stages = self.of_stages((rules, optimizers))
        grid = merged([of_stage for of_stage, _ in of_stages], self.mesh)
        states = _merged_states([of_stage for _, of_stage in of_stages])
        plan = replace(self._plans[digests], optimizers=states)
        return nonce, parent, _with_grid(plan, grid, holding, self.rank)


ALONE = WriterGroup()


def uses_grid(writers: WriterGroup) -> bool:
    """Whether ``writers`` save with rules: format 1.1 instead of 1.0."""
    is_many = writers.size > MOST_WITH_PIECES or writers.is_apart
    is_on_mesh = prod(writers.mesh.values()) == writers.size
    return is_many and is_on_mesh and writers.layout == "distributed"


def save(
    root: Path | str,
    step: int,
    states: Mapping[str, Stateful],
    *,
    kind: Kind = "full",
    companions: Mapping[str, bytes] | None = None,
    parent: str | None = None,
    max_shard_size: int = 5_000_000_000,
    writers: WriterGroup = ALONE,
) -> Path:
    """Write ``root/checkpoint-{step}`` and return it; it is on the disk when this returns.

    ``states`` are parts of a run by name. Some have files of their own: ``model``, a module or
    anything whose state is a flat dict of tensors, ``optimizer``, and every ``FileState``, the
    weights of another network or their optimizer's state. ``kind`` is ``adapter`` if the model's
    tensors are those of a PEFT adapter. ``companions`` are small files that are stored beside them
    (config.json, tokenizer.json, ...). ``parent`` names the checkpoint from which this run has
    resumed; files that are equal in it are linked. ``writers`` are the ranks that save together,
    which all call this, and the layout: ``full``, or ``distributed`` for a folder per rank.

    Raises ``CheckpointError``, leaving nothing behind, if the checkpoint already exists, a state
    cannot be stored, or the disk fails.
    """
    job, live = prepare(
        root,
        step,
        states,
        kind=kind,
        companions=companions,
        parent=parent,
        max_shard_size=max_shard_size,
        writers=writers,
    )
    return write(job, live).path


def prepare(
    root: Path | str,
    step: int,
    states: Mapping[str, Stateful],
    *,
    kind: Kind = "full",
    companions: Mapping[str, bytes] | None = None,
    parent: str | None = None,
    max_shard_size: int = 5_000_000_000,
    writers: WriterGroup = ALONE,
) -> tuple[Job, LiveTensors]:
    """What this rank would write, and its live tensors, unread. A collective call."""
    with_files, rest = adopted(states)
    groups, skeleton = _split(with_files, rest)
    parts = {role: _parts(role, t, with_files.get(role)) for role, t in groups.items()}
    tensors: Mapping[str, Described]
    tensors = {role: _described(role, local_boxes) for role, local_boxes in parts.items()}
    nonce: str | None = None
    grid: Grid | None = None
    if writers.size == 1:
        _refuse_incomplete(parts)
    else:
        sharded = {role: skeleton[role] for role in groups if role in skeleton}
        nonce, parent, plan = writers.agree(
            _local_tensors(parts, tensors, kind, writers), sharded, parent
        )
        tensors, grid = plan.tensors, plan.grid
        parts = {role: _narrowed(boxes, plan.mine.get(role, {})) for role, boxes in parts.items()}
        skeleton |= plan.optimizers
    shards = _shards(parts, tensors, kind, max_shard_size, writers)
    small = (
        {**indexes(shards, writers.size), STATE: _dump_skeleton(skeleton)}
        if writers.rank == 0
        else {}
    )
    job = Job(
        root=Path(root),
        step=step,
        kind=kind,
        created=now(),
        versions=versions(),
        shards=shards,
        small={**_checked(companions or {}, {*small, MANIFEST}), **small} if small else {},
        parent=parent,
        layout=writers.layout,
        rank=writers.rank,
        world_size=writers.size,
        mesh=writers.mesh,
        nonce=nonce,
        grid=None if grid is None else grid.dump(),
    )
    values = {role: {n: p.values for n, p in boxes.items()} for role, boxes in parts.items()}
    return job, LiveTensors(values)


def _parts(role: str, tensors: Tensors, state: ShardedState | None) -> dict[str, LocalBox]:
    """The tensors of this rank, without those that another pipeline stage writes."""
    return {
        name: local_box_of(
            f"{role}: {name}", tensor, None if state is None else state.cuts_of(name)
        )
        for name, tensor in tensors.items()
        if not (tensor.is_meta or (state is not None and state.is_copy(name)))
    }


def _refuse_incomplete(parts: ByRole) -> None:
    """A rank that saves alone must have every tensor in full: no other writes the rest."""
    for role, local_boxes in parts.items():
        for name, local in local_boxes.items():
            if local.box != Box.whole(local.shape):
                raise CheckpointError(
                    f"{role}: {name}: this process saves alone, but has only "
                    f"{list(local.box.shape)} of {list(local.shape)}; pass the full tensor "
                    "(`full_tensor()`)"
                )


def _described(role: str, parts: Mapping[str, LocalBox]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype and full shape of each tensor; an error if one cannot be stored."""
    return {n: (describe(f"{role}: {n}", p.values)[0], p.shape) for n, p in parts.items()}


def _local_tensors(
    parts: ByRole, tensors: Mapping[str, Described], kind: Kind, writers: WriterGroup
) -> Holding:
    """The same for the other ranks; other states differ between ranks, and rank 0's are saved."""

    def described(role: str, name: str, part: LocalBox) -> LocalTensor:
        cuts = None if FileRole(role, kind).is_adapter else part.cuts  # which is one file
        return LocalTensor(tensors[role][name][0], part.shape, part.box, cuts)

    return {
        role: {name: described(role, name, part) for name, part in local_boxes.items()}
        for role, local_boxes in parts.items()
        if writers.rank == 0 or not FileRole(role).is_of_rank_0
    }


def _narrowed(parts: Mapping[str, LocalBox], boxes: Mapping[str, Box]) -> dict[str, LocalBox]:
    return {name: parts[name].narrowed(boxes[name]) for name in parts if name in boxes}


@dataclass(frozen=True)
class LiveTensors:
    """The current tensors of a job, by role and name."""

    groups: Mapping[str, Tensors]

    def write(self, shard: Shard, file: files.File) -> Mapping[str, str]:
        """Write and flush the file, or this rank's part of it; returns the hashes by tensor."""
        tensors = self.groups[shard.role]
        if shard.share is None:
            return write_file(file, shard.plan, tensors)
        if shard.share.has_head:
            file.write_at(0, shard.plan.head)
        entries, boxes = shard.plan.header.entries, shard.share.boxes
        hashes = {n: write_box(file, entries[n], boxes[n], tensors[n]) for n in boxes}
        file.sync()
        return hashes

    def hash(self, shard: Shard, name: str) -> str:
        """The hash of one tensor's bytes."""
        return write_tensor(None, self.groups[shard.role][name])

    def blocks(self, shard: Shard, name: str, size: int) -> list[str]:
        """The hash of each ``size`` of these bytes."""
        return block_hashes(self.groups[shard.role][name], size)


def now() -> str:
    """The time as a manifest records it."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def versions() -> dict[str, str]:
    """The versions of the software that wrote the checkpoint."""
    return {"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}}


@cache  # looking it up takes longer than saving a small state
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"


def _split(
    with_files: Mapping[str, ShardedState], rest: Mapping[str, Stateful]
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """The tensors of each role by their key in the file, and the structure of all states."""
    if odd := [name for name in (*with_files, *rest) if not name.isidentifier()]:
        raise CheckpointError(f"the state name {odd[0]!r} is not a plain word; choose another")
    groups: dict[str, dict[str, torch.Tensor]] = {MODEL: {}, OPTIMIZER: {}}
    skeleton: dict[str, Any] = {}
    for name, state in with_files.items():
        if FileRole(name).is_weights:
            groups[name] = _flat(name, state.state_dict())
        else:
            groups[name], skeleton[name] = split(state.state_dict(), name)
    others = {name: state.state_dict() for name, state in rest.items()}
    groups[STATE_ROLE], structure = split(others, STATE_ROLE)
    return groups, skeleton | structure


def _flat(role: str, tree: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    for name, value in tree.items():
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise CheckpointError(f"{role}: {name!r} is a {kind}, expected a tensor")
    return dict(tree)


def _shards(
    parts: ByRole,
    tensors: Mapping[str, Described],
    kind: Kind,
    max_shard_size: int,
    writers: WriterGroup,
) -> list[Shard]:
    """The files of every role of which this rank writes a part.

    Several ranks share those of layout ``full``, and an adapter's in both layouts. Otherwise they
    are in the folder of this rank, and contain the box of each tensor in their header; an adapter's
    boxes too, where ranks have no folder in common (``_apart`` makes one file of them).
    """
    shards: list[Shard] = []
    for name, local_boxes in parts.items():
        role, whole = FileRole(name, kind), tensors.get(name, {})
        is_boxed = writers.layout == "distributed" and (writers.is_apart or not role.is_adapter)
        is_joint = writers.size > 1 and not (role.is_of_rank_0 or is_boxed)
        held = {tensor: (whole[tensor][0], p.box.shape) for tensor, p in local_boxes.items()}
        described = whole if is_joint else held
        if not described:
            continue
        stem, boxes = role.stem, None
        if is_boxed:
            stem = f"{RANK_FOLDER.format(writers.rank)}/{role.stem}"
            boxes = {tensor: (p.shape, p.box) for tensor, p in local_boxes.items()}
        limit = max_shard_size if role.is_split_by_size else None
        apart = still_in(role, described, tensors.get(role.optimizer, {}))
        plans = plan_save(stem, described, limit, apart=apart, boxes=boxes)
        if not is_joint:
            shards += [Shard(name, plan) for plan in plans]
            continue
        has_head = writers.rank == 0  # so that exactly one rank writes what precedes the tensors
        for plan in plans:
            mine = [tensor for tensor in plan.header.entries if tensor in local_boxes]
            if mine or has_head:
                written = {tensor: local_boxes[tensor].box for tensor in mine}
                shards.append(Shard(name, plan, WriteShare(written, has_head)))
    return shards


def still_in(role: FileRole, tensors: Described, moments: Collection[str]) -> Collection[str]:
    """The tensors of a role that no optimizer moves; ``moments`` names its optimizer's tensors."""
    if role.is_adapter or not role.is_weights:
        return ()
    still = tensors.keys() - trained_names(moments)
    sizes = {name: num_bytes(*described) for name, described in tensors.items()}
    share = sum(sizes[name] for name in still) / max(sum(sizes.values()), 1)
    # A share of 1 is a save without an optimizer: nothing is known to be frozen.
    return still if WORTH_SHARING <= share < 1 else set()


def indexes(shards: Sequence[Shard], num_ranks: int) -> dict[str, bytes]:
    """The index of every role with several files; in layout distributed, of the weights only."""
    index_files = {}
    for role in dict.fromkeys(shard.role for shard in shards):
        plans = [shard.plan for shard in shards if shard.role == role]
        stem = plans[0].name.partition("-00001-of-")[0].removesuffix(".safetensors")
        is_in_folder = "/" in stem
        if role == MODEL and num_ranks == 1 if is_in_folder else len(plans) > 1:
            index_files[f"{stem.rpartition('/')[2]}.safetensors.index.json"] = dump_index(plans)
    return index_files


def dump_index(plans: Sequence[FilePlan]) -> bytes:
    """Hugging Face's index over weight files."""
    total = sum(plan.header.file_size - plan.header.data_start for plan in plans)
    names = {name: plan.name for plan in plans for name in plan.header.entries}
    return strict_json.dump({"metadata": {"total_size": total}, "weight_map": names}, indent=2)


def _dump_skeleton(skeleton: Mapping[str, Any]) -> bytes:
    rows = (
        f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}"
        for name, value in skeleton.items()
    )
    return ("{\n" + ",\n".join(rows) + "\n}\n").encode()  # a state a line; dicts keep their order


def _checked(companions: Mapping[str, bytes], taken: Collection[str]) -> Mapping[str, bytes]:
    for name, data in companions.items():
        if not is_plain_name(name):
            raise CheckpointError(
                f"companion {name!r}: not a plain name of a file inside the checkpoint"
            )
        if name in taken or name.endswith(".safetensors"):
            raise CheckpointError(
                f"companion {name!r}: the checkpoint writes a file of that name itself"
            )
        if len(data) > MAX_SMALL:
            raise CheckpointError(
                f"companion {name!r}: {len(data)} bytes, more than the {MAX_SMALL} allowed"
            )
    return companions


def _plan(states_of_ranks: list[tuple[Holding, Mapping[str, Any]]], rank: int) -> SavePlan:
    mine = shared_out([tensors for tensors, _ in states_of_ranks])[rank]
    whole: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for tensors, _ in states_of_ranks:
        for role, local_tensors in tensors.items():
            for name, tensor in local_tensors.items():
                whole.setdefault(role, {}).setdefault(name, (tensor.dtype, tensor.shape))
    return SavePlan(whole, mine, _merged_states([states for _, states in states_of_ranks]))


def _merged_states(of_ranks: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    optimizers: dict[str, dict[str, Any]] = {}
    for states in of_ranks:
        for role, state in states.items():
            known = optimizers.setdefault(role, {})
            known |= {name: slots for name, slots in state.items() if name not in known}
    return optimizers


def _with_grid(plan: SavePlan, grid: Grid, holding: Holding, rank: int) -> SavePlan:
    """``plan`` with the tensors of ``grid``, and with those that this rank alone saves."""
    tensors = {role: dict(described) for role, described in plan.tensors.items()}
    mine = {role: dict(boxes) for role, boxes in plan.mine.items()}
    boxes = grid.boxes_of(rank)
    for rule in grid.rules:
        role, _, name = rule.tensor.partition("/")
        tensors.setdefault(role, {})[name] = rule.dtype, rule.shape
        if rule.tensor in boxes:
            mine.setdefault(role, {})[name] = boxes[rule.tensor]
    for role, local in holding.items():
        if FileRole(role).is_of_rank_0:
            tensors[role] = {name: (tensor.dtype, tensor.shape) for name, tensor in local.items()}
            mine[role] = {name: tensor.box for name, tensor in local.items()}
    return replace(plan, tensors=tensors, mine=mine, grid=grid if grid.rules else None)
