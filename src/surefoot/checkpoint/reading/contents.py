"""All tensors and states of a checkpoint under one set of names.

A tensor is called ``role/name`` internally, for example ``model/...`` or ``optimizer/...``; users
may omit the ``model/``. A foreign folder contains a model, and perhaps the log of its run. No
torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...storage import files
from ...terminal_text import one_line
from ..layouts.detection import detect_layout, expect_layout
from ..layouts.layout import logged_states, read_small
from ..sources.weights import FolderWeights

_MODEL = "model/"


def open_contents(folder: Path, roles: Collection[str] | None = None) -> FolderWeights:
    """Every tensor of a folder by its full name, of all networks, or of some ``roles``."""
    layout = expect_layout(folder)
    with files.raising(CheckpointError, f"cannot read {folder}"):
        tensors = layout.open_all(folder, None if roles is None else frozenset(roles))
    return FolderWeights(layout.name, folder, tensors)


def shown(name: str) -> str:
    """A tensor's full name in the form for users."""
    return name.removeprefix(_MODEL)


def find_tensor(contents: FolderWeights, name: str) -> str:
    """The full name of the tensor that a user calls ``name``; an error suggests near names."""
    for full in (_MODEL + name, name):
        if full in contents.tensors:
            return full
    near = difflib.get_close_matches(name, map(shown, contents.tensors), n=3, cutoff=0.5)
    inside = [known for known in map(shown, contents.tensors) if name in known][:3]
    hint = " or ".join(map(one_line, inside or near))
    raise CheckpointError(
        f"{contents.folder}: it contains no tensor {name!r}"
        + (f"; did you mean {hint}?" if hint else "; `surefoot ckpt show --tensors` lists them")
    )


def states_of(folder: Path) -> Mapping[str, Any]:
    """The states without their tensors, as stored; for a foreign folder, the log of the run."""
    with files.raising(CheckpointError):
        layout = detect_layout(folder)
        return logged_states(folder) if layout is None else layout.states(folder)


def small_file(folder: Path, name: str) -> bytes | None:
    """The content of a companion file, its hash checked if it has one; None without the file."""
    with files.raising(CheckpointError):
        layout = detect_layout(folder)
        return read_small(folder, name) if layout is None else layout.small_file(folder, name)


def plain(skeleton: Any) -> Any:
    """A stored state as plain data: without tensors, with tagged values converted."""
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
