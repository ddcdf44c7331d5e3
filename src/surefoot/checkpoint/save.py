"""Save a dict of states as one checkpoint folder, all of it or nothing."""

from __future__ import annotations

import json
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import files
from ..errors import CheckpointError
from . import strict
from .boxed import Part, part
from .bytes import describe, hash_tensor, write_file
from .index import MANIFEST, MAX_SMALL, STATE, Kind, Layout, is_plain_name
from .job import Job, Shard
from .plan import FilePlan, plan_save
from .staged import StagedWeights, whole
from .states import Stateful, adopted, cuts_of, is_copy
from .tensors import split
from .write import write

WEIGHT_STEMS: Mapping[Kind, str] = {"full": "model", "adapter": "adapter_model"}
LIBRARIES = ("surefoot", "torch", "transformers", "peft", "safetensors")
RANK_FOLDER = "rank_{:05d}"  # of layout distributed
WORTH_SHARING = 0.1  # of the weights' bytes


Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Crew:
    """The processes that write a checkpoint together, as one of them sees them, and how."""

    layout: Layout = "full"  # several processes always write their boxes: ``distributed``
    rank: int = 0
    size: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    nonce: str | None = None  # on which they have agreed

    @property
    def leads(self) -> bool:
        """Whether this is the first process that has the layers it has: the axis ``pp``, along
        which they are shared out, is the outermost one."""
        return self.rank % (self.size // self.mesh.get("pp", 1)) == 0


def save(
    root: Path | str,
    step: int,
    states: Mapping[str, Stateful],
    *,
    kind: Kind = "full",
    companions: Mapping[str, bytes] | None = None,
    parent: str | None = None,
    max_shard_size: int = 5_000_000_000,
    layout: Layout = "full",
) -> Path:
    """Write ``root/checkpoint-{step}`` and return it; it is on the disk when this returns.

    ``states`` are parts of a run by name. Two have files of their own: ``model``, a module or
    anything whose state is a flat dict of tensors, and ``optimizer``. ``kind`` is ``adapter`` if
    the model's tensors are those of a PEFT adapter. ``companions`` are small files that lie beside
    (config.json, tokenizer.json, ...). ``parent`` names the checkpoint this run went on from; files
    that are equal in it are linked. ``layout`` is ``full``, or ``distributed`` for a folder a rank.

    Raises ``CheckpointError``, leaving nothing behind, if the checkpoint exists already, a state
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
        crew=Crew(layout),
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
    crew: Crew = Crew(),
) -> tuple[Job, Live]:
    """What ``save`` would write, and the live tensors; nothing is read from these yet.

    Of several processes (``crew``) each writes the boxes that it holds, in layout ``distributed``;
    the first one writes what is whole in all of them.
    """
    groups, skeleton = _split({name: s.state_dict() for name, s in adopted(states).items()})
    layout: Layout = "distributed" if crew.size > 1 else crew.layout
    if kind == "adapter":  # one small file, as PEFT wants it
        groups["model"] = _gathered(states["model"], groups["model"])
    is_first = {"model": crew.leads if kind == "full" else crew.rank == 0, "optimizer": crew.leads}
    parts = {
        role: _parts(role, tensors, states.get(role), is_main=is_first.get(role, crew.rank == 0))
        for role, tensors in groups.items()
    }
    moved = {name.rpartition(".")[0] for name in groups["optimizer"]}
    still = _still(parts["model"], moved) if kind == "full" else set()
    shards = _plan(parts, kind, max_shard_size, layout, crew, still)
    ours = {**indexes(shards, crew.size), STATE: _dump_skeleton(skeleton)} if crew.rank == 0 else {}
    job = Job(
        root=Path(root),
        step=step,
        kind=kind,
        created=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        versions=versions(),
        shards=shards,
        small={**_checked(companions or {}, {*ours, MANIFEST}), **ours} if ours else {},
        parent=parent,
        layout=layout,
        rank=crew.rank,
        world_size=crew.size,
        mesh=crew.mesh,
        nonce=crew.nonce,
    )
    values = {role: {n: p.values for n, p in found.items()} for role, found in parts.items()}
    return job, Live(values)


def _gathered(state: Stateful, tensors: Tensors) -> dict[str, torch.Tensor]:
    """The tensors of a state, whole, in the first process at least."""
    if isinstance(state, StagedWeights):
        return state.whole()
    return {name: whole(tensor) for name, tensor in tensors.items()}


def _parts(
    role: str, tensors: Tensors, state: Stateful | None, *, is_main: bool
) -> dict[str, Part]:
    """What this process is to write."""
    found = {
        name: part(f"{role}: {name}", tensor, cuts_of(state, name), is_main=is_main)
        for name, tensor in tensors.items()
        if not is_copy(state, name)
    }
    return {name: one for name, one in found.items() if one.is_mine}


@dataclass(frozen=True)
class Live:
    """The tensors of a job as they are now, by role and name."""

    groups: Mapping[str, Tensors]

    def write(self, shard: Shard, file: files.File) -> Mapping[str, str]:
        """Fill and flush the file; the hash of each tensor's bytes by name."""
        return write_file(file, shard.plan, self.groups[shard.role])

    def hash(self, shard: Shard, name: str) -> str:
        """The hash of one tensor's bytes."""
        return hash_tensor(self.groups[shard.role][name])


def versions() -> dict[str, str]:
    """The versions of what wrote the checkpoint."""
    return {"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}}


@cache  # looking it up takes longer than saving a small state
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"


def _split(
    trees: Mapping[str, dict[str, Any]],
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """The tensors of each role by their key in the file, and the skeleton of all states."""
    groups: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}, "state": {}}
    skeleton: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, tree in trees.items():
        if not name.isidentifier():
            raise CheckpointError(f"a state cannot be called {name!r}; choose a plain word")
        if name == "model":
            groups["model"] = _flat(tree)
        elif name == "optimizer":
            groups["optimizer"], skeleton["optimizer"] = split(tree, "optimizer")
        else:
            rest[name] = tree
    groups["state"], others = split(rest, "state")
    return groups, skeleton | others


def _flat(tree: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    for name, value in tree.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"model: {name!r} is a {type(value).__name__}, expected a tensor")
    return dict(tree)


def _plan(
    groups: Mapping[str, Mapping[str, Part]],
    kind: Kind,
    max_shard_size: int,
    layout: Layout,
    crew: Crew,
    still: Collection[str],
) -> list[Shard]:
    """The files of every role that has tensors. An adapter is one file: PEFT knows no shards.

    In layout ``distributed`` all but an adapter lie in the folder of this rank, and say which box
    of its tensor each one is.
    """
    stems = {"model": WEIGHT_STEMS[kind], "optimizer": "optimizer", "state": "state"}
    is_whole = {"model": kind == "adapter", "optimizer": False, "state": True}
    shards = []
    for role, tensors in groups.items():
        described = {n: describe(f"{role}: {n}", one.values) for n, one in tensors.items()}
        limit = None if is_whole[role] else max_shard_size
        apart = still if role == "model" else ()
        stem, boxes = stems[role], None
        if layout == "distributed" and stem != WEIGHT_STEMS["adapter"]:
            stem = f"{RANK_FOLDER.format(crew.rank)}/{stem}"
            boxes = {name: (one.shape, one.box) for name, one in tensors.items()}
        plans = plan_save(stem, described, limit, apart=apart, boxes=boxes) if tensors else []
        shards += [Shard(role, plan) for plan in plans]
    return shards


def _still(model: Mapping[str, Part], moved: Collection[str]) -> set[str]:
    """Weights that no optimizer moves, if they are worth files of their own, to be shared.

    The optimizer's tensors are named after the weights it moves.
    """
    still = {name for name in model if name not in moved}
    # nbytes would raise for a sparse tensor, which is refused with a name later on
    sizes = {name: one.values.numel() * one.values.element_size() for name, one in model.items()}
    share = sum(sizes[name] for name in still) / max(sum(sizes.values()), 1)
    return still if WORTH_SHARING <= share < 1 else set()


def indexes(shards: Sequence[Shard], num_ranks: int) -> dict[str, bytes]:
    """The ``*.safetensors.index.json`` of every role that took several files.

    In layout ``distributed`` it is for the weights alone, at the top, so that ``from_pretrained``
    finds them; for the rest the manifest says what is where.
    """
    found = {}
    for role in dict.fromkeys(shard.role for shard in shards):
        plans = [shard.plan for shard in shards if shard.role == role]
        stem = plans[0].name.partition("-00001-of-")[0].removesuffix(".safetensors")
        is_in_folder = "/" in stem
        if role == "model" and num_ranks == 1 if is_in_folder else len(plans) > 1:
            found[f"{stem.rpartition('/')[2]}.safetensors.index.json"] = dump_index(plans)
    return found


def dump_index(plans: Sequence[FilePlan]) -> bytes:
    """Hugging Face's index over weight files."""
    total = sum(plan.header.file_size - plan.header.data_start for plan in plans)
    names = {name: plan.name for plan in plans for name in plan.header.entries}
    return strict.dump({"metadata": {"total_size": total}, "weight_map": names}, indent=2)


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
                f"companion {name!r}: not the plain name of a file inside the checkpoint"
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
