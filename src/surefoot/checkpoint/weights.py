"""The weights in a folder, of Surefoot or foreign, from names and headers alone. No torch.

A folder of weights is one of five kinds: a Surefoot checkpoint (``manifest.json``), a PEFT adapter
(``adapter_config.json``), a Hugging Face model (``model.safetensors``, one file or several), boxes
of tensors as PyTorch's distributed checkpoints write them (``shard-00001-model-...``), or
MindSpore's files (``rank_0``, ``part0.safetensors``, ``iteration_00000020``).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..errors import CheckpointError
from ..geometry.box import Box
from ..storage import files
from . import dcp
from .disk import strict_json, tensorfile
from .disk.commit import named
from .disk.folder import CheckpointFolder, open_checkpoint
from .disk.header import Entry
from .disk.manifest import MANIFEST, STATE, Piece, is_plain_name
from .mindspore import opened as mindspore
from .mindspore.ranks import old_file
from .mindspore.shapes import Shapes

Layout = Literal["native", "peft", "huggingface", "dcp", "mindspore"]
FOREIGN: tuple[Layout, ...] = ("huggingface", "peft", "dcp", "mindspore")

MODEL = "model.safetensors"
MODEL_INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
DISTRIBUTED = (".metadata", "pytorch_model_fsdp_0")  # of DCP; of the Trainer with FSDP
DEEPSPEED = ("latest", "latest_universal", "zero_to_fp32.py")  # beside its checkpoints
_OF_DEEPSPEED = ("_model_states.pt", "_optim_states.pt")  # in them
PICKLES = (".bin", ".pt", ".pth", ".ckpt")

# Reads pickles as tensors only, joins the shards, and writes what every tool can read.
_CONVERT = (
    "from pathlib import Path; from safetensors.torch import save_file; from torch import load; "
    "save_file({{name: tensor.contiguous().clone() "
    "for file in sorted(Path({folder!r}).glob({glob!r})) "
    "for name, tensor in load(file, map_location='cpu', weights_only=True).items()}}, "
    "Path({folder!r}) / {target!r}, {{'format': 'pt'}})"
)


@dataclass(frozen=True)
class StoredBox:
    """One box of a tensor. In ``file``, ``key`` is either the box or the full tensor."""

    file: tensorfile.TensorFile
    key: str
    box: Box
    hash: str | None = None  # known for checkpoints of ours

    def in_file(self, box: Box) -> Box:
        """The position, in what is stored, of a box inside this one."""
        is_whole = self.file.entry(self.key).shape != self.box.shape
        return box if is_whole else box.moved_into(self.box)


@dataclass(frozen=True)
class TensorLocation:
    """One tensor in a file. ``hash`` is known for Surefoot checkpoints.

    A tensor with several ``parts`` has no hash itself; its file and key are those of the first
    part, and its entry has the dtype and the full shape.
    """

    file: tensorfile.TensorFile
    key: str
    entry: Entry
    hash: str | None = None
    parts: tuple[StoredBox, ...] = ()


@dataclass(frozen=True)
class Weights:
    """The weights of a folder by name. The files close when they are no longer referenced."""

    layout: Layout
    folder: Path
    tensors: Mapping[str, TensorLocation]


def detect_layout(folder: Path) -> Layout | None:
    """The kind of the folder of weights ``folder``; None if it is none that can be read."""
    if files.exists(folder / MANIFEST) or files.exists(folder / STATE):
        return "native"  # without a manifest it is damaged, not somebody else's
    has_model = any(files.exists(folder / name) for name in (MODEL, MODEL_INDEX))
    if files.exists(folder / ADAPTER) and not has_model:
        return "peft"
    if has_model:
        return "huggingface"
    if dcp.shard_files(folder):
        return "dcp"
    return "mindspore" if mindspore.form_of(folder) else None


def is_deepspeed(folder: Path) -> bool:
    """Whether ``folder`` is a checkpoint of DeepSpeed, or contains some. By names alone."""
    names = files.list_folder(folder) if files.is_folder(folder) else []
    return any(name in DEEPSPEED or name.endswith(_OF_DEEPSPEED) for name in names)


def open_weights(folder: Path) -> Weights:
    """The weights in ``folder``, whatever its layout; a ``CheckpointError`` if there are none."""
    layout = detect_layout(folder)
    with files.raising(CheckpointError, f"cannot read the weights in {folder}"):
        if layout is None:
            raise CheckpointError(_why_not(folder))
        return _OPEN[layout](folder)


def open_native(folder: Path) -> Weights:
    """The model (or adapter) part of a Surefoot checkpoint."""
    checkpoint = open_checkpoint(folder)
    return Weights("native", folder, places(checkpoint, checkpoint.manifest.tensors("model")))


def places(
    checkpoint: CheckpointFolder, tensors: Mapping[str, Sequence[Piece]]
) -> dict[str, TensorLocation]:
    """The positions of the tensors of a Surefoot checkpoint, each file opened once."""
    names = {piece.file for pieces in tensors.values() for piece in pieces}
    opened = {name: checkpoint.tensors(name) for name in names}
    return {name: _place(pieces, opened) for name, pieces in tensors.items()}


def _place(pieces: Sequence[Piece], opened: Mapping[str, tensorfile.TensorFile]) -> TensorLocation:
    first = pieces[0]
    file = opened[first.file]
    entry = file.entry(first.key)
    if len(pieces) == 1:  # it is all of the tensor
        return TensorLocation(file, first.key, entry, first.hash)
    parts = tuple(StoredBox(opened[p.file], p.key, p.box, p.hash) for p in pieces)
    return TensorLocation(
        file, first.key, Entry(first.dtype, first.shape, entry.offset), None, parts
    )


def open_peft(folder: Path) -> Weights:
    """A PEFT adapter."""
    return Weights("peft", folder, _stored([tensorfile.open_path(folder / ADAPTER)]))


def open_huggingface(folder: Path) -> Weights:
    """A Hugging Face model. As in transformers, a single file has precedence over the index."""
    if files.exists(folder / MODEL):
        return Weights("huggingface", folder, _stored([tensorfile.open_path(folder / MODEL)]))
    where = folder / MODEL_INDEX
    with files.open_file(where) as file:
        index = strict_json.parse_object(files.read_all(file, strict_json.MAX_BYTES), str(where))
    names = index.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
        raise CheckpointError(f"{where}: weight_map must map tensor names to file names")
    for name in sorted(set(names.values())):
        if not is_plain_name(name) or "/" in name:
            raise CheckpointError(f"{where}: {name[:200]!r} is not a file in this folder")
    opened = [tensorfile.open_path(folder / name) for name in sorted(set(names.values()))]
    found = _stored(opened)
    for tensor, name in names.items():
        if tensor not in found or found[tensor].file.path.name != name:
            raise CheckpointError(
                f"{folder / name}: according to the index, {tensor[:200]!r} must be in this file"
            )
    return Weights("huggingface", folder, found)


def open_dcp(folder: Path) -> Weights:
    """Boxes of tensors in safetensors, as PyTorch's distributed checkpoints write them."""
    return Weights("dcp", folder, _from_boxes(dcp.open_boxes(folder)))


def open_mindspore(
    folder: Path, *, strategy: Path | None = None, shapes: Shapes | None = None
) -> Weights:
    """The weights under MindSpore's names, without training state."""
    every = open_mindspore_state(folder, strategy=strategy, shapes=shapes)
    model = {n: p for n, p in every.items() if mindspore.role_of(n, p.entry.shape) == "model"}
    return Weights("mindspore", folder, model)


def open_mindspore_state(
    folder: Path, *, strategy: Path | None = None, shapes: Shapes | None = None
) -> dict[str, TensorLocation]:
    """All tensors that MindSpore saved, by its names: weights, moments, numbers of the training
    state.
    """
    return _from_boxes(mindspore.open_boxes(folder, strategy=strategy, shapes=shapes))


def _from_boxes(tensors: Mapping[str, Sequence[dcp.Stored]]) -> dict[str, TensorLocation]:
    found = {}
    for name, boxes in tensors.items():
        first = boxes[0]
        entry = first.file.entry(name)
        parts = tuple(StoredBox(box.file, name, box.box) for box in boxes) if len(boxes) > 1 else ()
        found[name] = TensorLocation(
            first.file, name, replace(entry, shape=first.shape), None, parts
        )
    return found


def _stored(opened: list[tensorfile.TensorFile]) -> dict[str, TensorLocation]:
    found: dict[str, TensorLocation] = {}
    for file in opened:
        for name, entry in file.header.entries.items():
            if name in found:
                raise CheckpointError(
                    f"{file.path}: {name[:200]!r} is in {found[name].file.path.name} as well"
                )
            found[name] = TensorLocation(file, name, entry)
    return found


def _why_not(folder: Path) -> str:
    if not files.is_folder(folder):
        what = "is a file, not a folder" if files.exists(folder) else "does not exist"
        return f"{folder} {what}"
    if inside := [path for path in named(folder) if detect_layout(path) is not None]:
        return f"{folder}: contains no weights itself; did you mean {inside[-1]}?"
    names = files.list_folder(folder)
    if old := old_file(folder):
        return (
            f"{old}: MindSpore's older format, which is not supported; convert it with "
            "mindspore.ckpt_to_safetensors"
        )
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
    return (
        f"{folder}: contains no weights; expected {MODEL}, {MODEL_INDEX}, {ADAPTER} or {MANIFEST}"
    )


def _refusal(folder: Path, names: list[str]) -> str:
    """Why a pickled file is not read, and the command that converts it to one that is."""
    reason = "a pickled file can run code when it is read, so Surefoot never reads it here"
    for stem, target in (("pytorch_model", MODEL), ("adapter_model", ADAPTER)):
        if any(name.startswith(stem) and name.endswith(".bin") for name in names):
            code = _CONVERT.format(folder=str(folder), glob=f"{stem}*.bin", target=target)
            return f"{reason}. Convert it once, as tensors only: python -c {shlex.quote(code)}"
    return f"{reason}. Convert it to safetensors with the tool that wrote it"


_OPEN: Mapping[Layout, Callable[[Path], Weights]] = {
    "native": open_native,
    "peft": open_peft,
    "huggingface": open_huggingface,
    "dcp": open_dcp,
    "mindspore": open_mindspore,
}
