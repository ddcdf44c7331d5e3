"""All tensors and states of a checkpoint under one set of names.

A tensor is called ``role/name`` internally, ``model/...``, ``optimizer/...`` or ``state/...``;
users may omit the ``model/``. A foreign folder contains a model, and perhaps the log of its run. No
torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...storage import files
from ..disk import strict_json, trainer_state
from ..disk.folder import open_checkpoint
from ..disk.manifest import STATE
from ..mindspore.opened import progress_of, role_of
from ..weights import Weights, detect_layout, open_mindspore_state, open_weights, places

ROLES = ("model", "optimizer", "state")
_MODEL = "model/"


def open_contents(folder: Path, roles: Collection[str] = ROLES) -> Weights:
    """Every tensor of ``roles`` in a folder of any layout, by its full name.

    Raises ``CheckpointError`` if the folder contains no weights, or is damaged.
    """
    with files.raising(CheckpointError, f"cannot read {folder}"):
        if detect_layout(folder) == "native":
            return _open_ours(folder, roles)
        if detect_layout(folder) == "mindspore":
            return _open_mindspore(folder, roles)
        opened = open_weights(folder)
    tensors = {_MODEL + name: place for name, place in opened.tensors.items()}
    return Weights(opened.layout, folder, tensors if "model" in roles else {})


def _open_ours(folder: Path, roles: Collection[str]) -> Weights:
    checkpoint = open_checkpoint(folder)
    found = checkpoint.manifest.by_tensor()
    wanted = {name: pieces for name, pieces in found.items() if name.partition("/")[0] in roles}
    return Weights("native", folder, places(checkpoint, wanted))


def _open_mindspore(folder: Path, roles: Collection[str]) -> Weights:
    found = {
        f"{role_of(name, place.entry.shape)}/{name}": place
        for name, place in open_mindspore_state(folder).items()
    }
    wanted = {name: place for name, place in found.items() if name.partition("/")[0] in roles}
    return Weights("mindspore", folder, wanted)


def shown(name: str) -> str:
    """A tensor's full name in the form for users."""
    return name.removeprefix(_MODEL)


def find_tensor(contents: Weights, name: str) -> str:
    """The full name of the tensor that a user calls ``name``; suggests near names if there is
    none.
    """
    for full in (_MODEL + name, name):
        if full in contents.tensors:
            return full
    near = difflib.get_close_matches(name, map(shown, contents.tensors), n=3, cutoff=0.5)
    inside = [known for known in map(shown, contents.tensors) if name in known][:3]
    hint = " or ".join(map(ascii_only, inside or near))
    raise CheckpointError(
        f"{contents.folder}: it contains no tensor {name!r}"
        + (f"; did you mean {hint}?" if hint else "; `surefoot ckpt show --tensors` lists them")
    )


def ascii_only(name: str) -> str:
    """``name`` with control characters escaped."""
    return name if name.isprintable() else name.encode("unicode_escape").decode("ascii")


def states_of(folder: Path) -> Mapping[str, Any]:
    """The states without their tensors, as they are stored; for a foreign folder, the log of the
    run.
    """
    with files.raising(CheckpointError):
        if detect_layout(folder) == "native":
            checkpoint = open_checkpoint(folder)
            return checkpoint.skeleton() if STATE in checkpoint.manifest.files else {}
        if detect_layout(folder) == "mindspore":
            progress = progress_of(folder)
            return {"progress": progress} if progress else {}
        if files.exists(folder / trainer_state.NAME):
            return {"trainer_state": trainer_state.load(folder)}
    return {}


def small_file(folder: Path, name: str) -> bytes | None:
    """The content of a companion file, its hash checked in a Surefoot checkpoint; None if there
    is no such file. Raises ``CheckpointError``.
    """
    with files.raising(CheckpointError):
        if detect_layout(folder) == "native":
            checkpoint = open_checkpoint(folder)
            return checkpoint.small(name) if name in checkpoint.manifest.files else None
        if not files.exists(folder / name):
            return None
        with files.open_file(folder / name) as file:
            return files.read_all(file, strict_json.MAX_BYTES)


def plain(skeleton: Any) -> Any:
    """A stored state as plain data to compare and read: without tensors, with tagged values
    converted.
    """
    if isinstance(skeleton, list):
        return [plain(item) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    tag = next(iter(skeleton), "")
    if len(skeleton) != 1 or not tag.startswith("$"):
        return dict(_without_tensors(skeleton))
    value = skeleton[tag]
    if tag == "$dict" and isinstance(value, list):
        pairs = {
            str(pair[0]): pair[1] for pair in value if isinstance(pair, list) and len(pair) > 1
        }
        return dict(_without_tensors(pairs))
    return plain(value) if tag == "$tuple" else value


def _without_tensors(skeleton: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in skeleton.items():
        is_tensor = isinstance(value, dict) and value.keys() == {"$tensor"}
        opened = None if is_tensor else plain(value)
        if not is_tensor and (opened != {} or value == {}):
            yield key, opened
