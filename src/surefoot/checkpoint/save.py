"""Save a dict of states as one checkpoint folder, all of it or nothing."""

from __future__ import annotations

import json
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import files
from ..errors import CheckpointError
from . import strict
from .box import Box
from .bytes import describe, write_file
from .commit import Part, aside
from .index import MANIFEST, MAX_SMALL, STATE, Kind, Manifest, Piece, dump, is_plain_name
from .plan import FilePlan, plan_save
from .states import Stateful
from .tensors import split

WEIGHT_STEMS: Mapping[Kind, str] = {"full": "model", "adapter": "adapter_model"}
LIBRARIES = ("surefoot", "torch", "transformers", "peft", "safetensors")


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
    if files.exists(target):
        raise CheckpointError(
            f"{target}: it exists already, and a checkpoint is never overwritten; "
            f"move it away or choose another output_dir"
        )
    trees = {name: state.state_dict() for name, state in states.items()}
    groups, skeleton = _split(trees)
    plans = _plan(groups, kind, max_shard_size)
    ours = {**_indexes(plans), STATE: _dump_skeleton(skeleton)}
    small = {**_checked(companions or {}, {*ours, MANIFEST}), **ours}
    with files.raising(CheckpointError, f"cannot save {target}"), aside(target) as part:
        written = _Written()
        for role, role_plans in plans.items():
            for plan in role_plans:
                _write_tensors(part, role, plan, groups[role], written)
        for name, data in sorted(small.items()):
            _write_small(part, name, data, written)
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
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from a source tree that is not installed
            found[name] = "unknown"
    return found


def _split(
    trees: Mapping[str, dict[str, Any]],
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """The tensors of each role by their key in the file, and the skeleton of all states."""
    groups: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}, "state": {}}
    skeleton: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, tree in trees.items():
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
) -> dict[str, list[FilePlan]]:
    """Files for every role that has tensors. An adapter is one file, as PEFT knows no shards."""
    stems = {"model": WEIGHT_STEMS[kind], "optimizer": "optimizer", "state": "state"}
    limits = {
        "model": max_shard_size if kind == "full" else None,
        "optimizer": max_shard_size,
        "state": None,
    }
    return {
        role: plan_save(
            stems[role], {n: describe(f"{role}: {n}", t) for n, t in tensors.items()}, limits[role]
        )
        for role, tensors in groups.items()
        if tensors
    }


def _indexes(plans: Mapping[str, list[FilePlan]]) -> dict[str, bytes]:
    """The ``*.safetensors.index.json`` of every role that took several files."""
    found = {}
    for role_plans in plans.values():
        if len(role_plans) > 1:
            stem = role_plans[0].name.rpartition("-00001-of-")[0]
            found[f"{stem}.safetensors.index.json"] = dump_index(role_plans)
    return found


def dump_index(plans: list[FilePlan]) -> bytes:
    """Hugging Face's index over weight files."""
    entries = [
        (name, entry, plan.name) for plan in plans for name, entry in plan.header.entries.items()
    ]
    return strict.dump(
        {
            "metadata": {"total_size": sum(entry.num_bytes for _, entry, _ in entries)},
            "weight_map": {name: file for name, _, file in entries},
        },
        indent=2,
    )


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


def _write_tensors(
    part: Part, role: str, plan: FilePlan, tensors: Mapping[str, torch.Tensor], written: _Written
) -> None:
    hashes = write_file(part.folder, plan, tensors)
    written.files[plan.name] = plan.header.file_size
    written.hashes[plan.name] = files.digest(plan.head)
    for name, entry in plan.header.entries.items():
        box = Box.whole(entry.shape)
        tensor = f"{role}/{name}"
        written.pieces.append(
            Piece(tensor, entry.dtype, entry.shape, box, plan.name, name, hashes[name])
        )


def _write_small(part: Part, name: str, data: bytes, written: _Written) -> None:
    path = part.folder / name
    if path.parent != part.folder:
        files.make_folder(path.parent)
    files.write_new(path, data)
    written.files[name] = len(data)
    written.hashes[name] = files.digest(data)
