"""Detect the layout of a folder, and say what is there instead if it has none. No torch.

``open_contents`` has all tensors of a checkpoint under one set of names. A tensor is called
``role/name`` internally, for example ``model/...`` or ``optimizer/...``; users may omit the
``model/``. A foreign folder contains a model, and perhaps the log of its run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, ModelError
from ...storage import files
from ...storage.weight_files import adapter_names, is_adapter, plain_names
from ..disk import strict_json
from ..disk.commit import named
from ..disk.folder import (
    ADAPTER,
    DEEPSPEED,
    DISTRIBUTED,
    MODEL,
    MODEL_INDEX,
    OF_DEEPSPEED,
    PICKLES,
    FolderWeights,
)
from ..disk.manifest import MANIFEST
from . import LAYOUTS
from .layout import AS_STORED, Layout, Reading, logged_states, read_small

# Reads pickles as tensors only, joins the shards, and writes what every tool can read.
_CONVERT = (
    "from pathlib import Path; from safetensors.torch import save_file; from torch import load; "
    "save_file({{name: tensor.contiguous().clone() "
    "for file in sorted(Path({folder!r}).glob({glob!r})) "
    "for name, tensor in load(file, map_location='cpu', weights_only=True).items()}}, "
    "Path({folder!r}) / {target!r}, {{'format': 'pt'}})"
)
# ``save_pretrained(variant="fp16")``: the name has the variant before its last suffix.
_VARIANT = re.compile(r"(model|model\.safetensors\.index)\.\w+(\.safetensors|\.json)")


def detect_layout(folder: Path) -> Layout | None:
    """The layout of a folder of weights; None if it is none that can be read."""
    return next((layout for layout in LAYOUTS.values() if layout.recognise(folder)), None)


def has_manifest(folder: Path) -> bool:
    """Whether ``folder`` is a Surefoot checkpoint, damaged or not."""
    layout = detect_layout(folder)
    return layout is not None and layout.has_manifest


def is_foreign(folder: Path) -> bool:
    """Whether ``folder`` contains weights of another tool."""
    layout = detect_layout(folder)
    return layout is not None and not layout.has_manifest


def expect_layout(folder: Path, reading: Reading = AS_STORED) -> Layout:
    """The layout of a folder of weights that is read by ``reading``; a ``CheckpointError`` if there
    are none."""
    with files.raising(CheckpointError, f"cannot read the weights in {folder}"):
        layout = detect_layout(folder)
        if layout is None:
            raise CheckpointError(_why_not(folder))
        if not layout.has_manifest:  # which says what the weights are
            _expect_one(folder)
    return layout.read_as(reading)


def _expect_one(folder: Path) -> None:
    """Raise ``CheckpointError`` if a folder has a model and an adapter."""
    try:
        is_adapter(folder)
    except ModelError as error:
        raise CheckpointError(str(error)) from None


def open_weights(folder: Path, reading: Reading = AS_STORED) -> FolderWeights:
    """The weights in ``folder``, whatever its layout, by their names without wrappers; a
    ``CheckpointError`` if there are none."""
    layout = expect_layout(folder, reading)
    with files.raising(CheckpointError, f"cannot read the weights in {folder}"):
        weights = layout.open(folder)
        if layout.has_manifest:  # of ours: nothing is wrapped
            return weights
        try:
            names = (adapter_names if layout.is_adapter else plain_names)(weights.tensors)
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from None
        return replace(weights, tensors={new: weights.tensors[old] for new, old in names.items()})


def names_save(path: Path) -> bool:
    """Whether the name of a file selects one save of the folder that contains it."""
    return any(layout.names_save(path) for layout in LAYOUTS.values())


def model_near(folder: Path) -> Path | None:
    """The folder with the ``config.json`` of the model whose weights ``folder`` has, if any."""
    layout = detect_layout(folder)
    if layout is not None:
        return layout.model_near(folder)
    return folder if files.exists(folder / "config.json") else None


def is_deepspeed(folder: Path) -> bool:
    """Whether ``folder`` is a checkpoint of DeepSpeed, or contains some. By names alone."""
    names = files.names_in(folder)
    return any(name in DEEPSPEED or name.endswith(OF_DEEPSPEED) for name in names)


def is_sequence_classification(folder: Path) -> bool:
    """Whether ``folder`` has a reward model, or another classifier, of transformers."""
    path = Path(folder) / "config.json"
    if not files.exists(path):
        return False
    names = strict_json.read_object(path).get("architectures")
    # As text: a stranger's list may be empty, or have anything in it.
    return isinstance(names, list) and str(names[:1]).endswith("ForSequenceClassification']")


def _why_not(folder: Path) -> str:
    if not files.is_folder(folder):
        what = "is a file, not a folder" if files.exists(folder) else "does not exist"
        return f"{folder} {what}"
    if inside := [path for path in named(folder) if detect_layout(path) is not None]:
        return f"{folder}: contains no weights itself; did you mean {inside[-1]}?"
    names = files.list_folder(folder)
    if reasons := [why for layout in LAYOUTS.values() if (why := layout.why_not(folder))]:
        return reasons[0]
    whose = "a distributed checkpoint of PyTorch, whose index is a pickle"
    if is_deepspeed(folder):
        whose = "a checkpoint of DeepSpeed, whose files are pickles"
    if any(name in names for name in DISTRIBUTED) or is_deepspeed(folder):
        return (
            f"{folder}: {whose}; `surefoot ckpt convert {shlex.quote(str(folder))} OUT --to "
            "huggingface --trust-pickle` converts it to a model"
        )
    if pickled := [name for name in names if name.endswith(PICKLES)]:
        return f"{folder / pickled[0]}: {_refusal(folder, pickled)}"
    return f"{folder}: {_missing(folder, names)}"


def _missing(folder: Path, names: list[str]) -> str:
    """What is expected of a folder, or the command that selects a variant of the weights."""
    variants = sorted(name for name in names if _VARIANT.fullmatch(name))
    if not variants:
        return f"contains no weights; expected {MODEL}, {MODEL_INDEX}, {ADAPTER} or {MANIFEST}"
    target = _VARIANT.sub(r"\1\2", variants[0])
    old, new = (shlex.quote(str(folder / name)) for name in (variants[0], target))
    return (
        f"contains only a variant of the weights, as transformers calls it: {', '.join(variants)}."
        f" Names say which weights are loaded, so select one by its name: mv {old} {new}"
    )


def _refusal(folder: Path, names: list[str]) -> str:
    """Why a pickled file is not read, and the command that converts it to one that is."""
    reason = "a pickled file can run code when it is read, so Surefoot never reads it here"
    for stem, target in (("pytorch_model", MODEL), ("adapter_model", ADAPTER)):
        if any(name.startswith(stem) and name.endswith(".bin") for name in names):
            code = _CONVERT.format(folder=str(folder), glob=f"{stem}*.bin", target=target)
            return f"{reason}. Convert it once, as tensors only: python -c {shlex.quote(code)}"
    return f"{reason}. Convert it to safetensors with the tool that wrote it"


_MODEL = "model/"


def open_contents(
    folder: Path, roles: Collection[str] | None = None, reading: Reading = AS_STORED
) -> FolderWeights:
    """Every tensor of a folder by its full name, of all networks, or of some ``roles``."""
    layout = expect_layout(folder, reading)
    with files.raising(CheckpointError, f"cannot read {folder}"):
        tensors = layout.open_all(folder, None if roles is None else frozenset(roles))
    return FolderWeights(layout.name, folder, tensors)


def shown(name: str) -> str:
    """A tensor's full name in the form for users."""
    return name.removeprefix(_MODEL)


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
