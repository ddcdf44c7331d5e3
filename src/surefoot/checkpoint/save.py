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
from .box import Box
from .bytes import describe, write_file
from .commit import aside, refuse_existing
from .index import MANIFEST, MAX_SMALL, STATE, Kind, Manifest, Piece, dump, is_plain_name
from .plan import FilePlan, plan_save
from .states import Stateful
from .tensors import split

WEIGHT_STEMS: Mapping[Kind, str] = {"full": "model", "adapter": "adapter_model"}
LIBRARIES = ("surefoot", "torch", "transformers", "peft", "safetensors")


@dataclass(frozen=True)
class _Shard:
    """One file of tensors to be."""

    role: str  # model, optimizer or state
    plan: FilePlan
    tensors: Mapping[str, torch.Tensor]


@dataclass
class _Written:
    """What lies in the folder so far."""

    files: dict[str, int] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)


def save(
    root: Path,
    step: int,
    states: Mapping[str, Stateful],
    *,
    kind: Kind,
    companions: Mapping[str, bytes] | None = None,
    parent: str | None = None,
    max_shard_size: int = 5_000_000_000,
) -> Path:
    """Write ``root/checkpoint-{step}`` and return it; it is on the disk when this returns.

    ``companions`` are small files that lie beside (config.json, tokenizer.json, ...). ``parent``
    names the checkpoint this run went on from. Raises ``CheckpointError``, leaving nothing behind,
    if the checkpoint exists already, a state cannot be stored, or the disk fails.
    """
    target = root / f"checkpoint-{step}"
    with files.raising(CheckpointError, f"cannot save {target}"):
        refuse_existing(target)
    groups, skeleton = _split({name: state.state_dict() for name, state in states.items()})
    shards = _plan(groups, kind, max_shard_size)
    ours = {**_indexes(shards), STATE: _dump_skeleton(skeleton)}
    small = {**_checked(companions or {}, {*ours, MANIFEST}), **ours}
    with files.raising(CheckpointError, f"cannot save {target}"), aside(target) as part:
        written = _write(part.folder, shards, small)
        manifest = Manifest(
            step=step,
            kind=kind,
            created=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            versions=versions(),
            files=written.files,
            hashes=written.hashes,
            pieces=written.pieces,
            parent=parent,
        )
        part.commit(target, dump(manifest))
    return target


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
    groups: Mapping[str, Mapping[str, torch.Tensor]], kind: Kind, max_shard_size: int
) -> list[_Shard]:
    """The files of every role that has tensors. An adapter is one file: PEFT knows no shards."""
    stems = {"model": WEIGHT_STEMS[kind], "optimizer": "optimizer", "state": "state"}
    is_whole = {"model": kind == "adapter", "optimizer": False, "state": True}
    shards = []
    for role, tensors in groups.items():
        described = {name: describe(f"{role}: {name}", t) for name, t in tensors.items()}
        limit = None if is_whole[role] else max_shard_size
        plans = plan_save(stems[role], described, limit) if tensors else []
        shards += [_Shard(role, plan, tensors) for plan in plans]
    return shards


def _indexes(shards: Sequence[_Shard]) -> dict[str, bytes]:
    """The ``*.safetensors.index.json`` of every role that took several files."""
    found = {}
    for role in dict.fromkeys(shard.role for shard in shards):
        plans = [shard.plan for shard in shards if shard.role == role]
        if len(plans) > 1:
            stem = plans[0].name.rpartition("-00001-of-")[0]
            found[f"{stem}.safetensors.index.json"] = dump_index(plans)
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


def _write(folder: Path, shards: Sequence[_Shard], small: Mapping[str, bytes]) -> _Written:
    """Write and flush all files but the manifest. Space for the large ones is claimed first."""
    written = _Written()
    for shard in shards:
        with files.create(folder / shard.plan.name) as file:
            file.reserve(shard.plan.header.file_size)
    for shard in shards:
        with files.open_file(folder / shard.plan.name, follow=False, write=True) as file:
            _note(written, shard, write_file(file, shard.plan, shard.tensors))
    for name, data in sorted(small.items()):
        path = folder / name
        if path.parent != folder:
            files.make_folder(path.parent)
        files.write_new(path, data)
        written.files[name] = len(data)
        written.hashes[name] = files.digest(data)
    return written


def _note(written: _Written, shard: _Shard, hashes: Mapping[str, str]) -> None:
    plan = shard.plan
    written.files[plan.name] = plan.header.file_size
    written.hashes[plan.name] = files.digest(plan.head)
    written.pieces += [
        Piece(
            tensor=f"{shard.role}/{name}",
            dtype=entry.dtype,
            shape=entry.shape,
            box=Box.whole(entry.shape),
            file=plan.name,
            key=name,
            hash=hashes[name],
        )
        for name, entry in plan.header.entries.items()
    ]
