"""Where the tensors of a folder are: which file, which key, which box. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError
from ...parallel.box import Box
from ..disk import tensorfile
from ..disk.folder import CheckpointFolder
from ..disk.manifest import Piece
from ..disk.tensorfile import TensorEntry

MODEL = "model.safetensors"
MODEL_INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
DISTRIBUTED = (".metadata", "pytorch_model_fsdp_0")  # of DCP; of the Trainer with FSDP
DEEPSPEED = ("latest", "zero_to_fp32.py")  # beside its checkpoints
OF_DEEPSPEED = ("_model_states.pt", "_optim_states.pt")  # in them
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


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
    entry: TensorEntry
    hash: str | None = None
    parts: tuple[StoredBox, ...] = ()


@dataclass(frozen=True)
class FolderWeights:
    """The weights of a folder by name. The files close when they are no longer referenced."""

    layout: str  # a name in LAYOUTS
    folder: Path
    tensors: Mapping[str, TensorLocation]


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
        file, first.key, TensorEntry(first.dtype, first.shape, entry.offset), None, parts
    )


def tensors_in(
    opened: list[tensorfile.TensorFile], chosen: Mapping[str, TensorLocation] | None = None
) -> dict[str, TensorLocation]:
    """The tensors of files that have each of them once, but for those of ``chosen``."""
    chosen = chosen or {}
    tensors = dict(chosen)
    for file in opened:
        for name, entry in file.header.entries.items():
            if name in chosen:
                continue
            if name in tensors:
                raise CheckpointError(
                    f"{file.path}: {name[:200]!r} is in {tensors[name].file.path.name} as well"
                )
            tensors[name] = TensorLocation(file, name, entry)
    return tensors
