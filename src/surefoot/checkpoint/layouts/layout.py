"""A layout: a kind of folder of weights, and how to look into it. No torch.

Names and headers are read, never a tensor. What differs between layouts is a field or a method
here, so that nobody compares a layout's name. The defaults are those of a model of another tool,
with the log of its training perhaps.

Here are also the layouts of Surefoot, where everything is in the manifest and is checked against
its hashes; of transformers, one ``model.safetensors`` or several files and an index; of PEFT,
``adapter_model.safetensors`` beside ``adapter_config.json``; and of PyTorch's distributed
checkpoints (DCP), boxes of tensors in safetensors. There every file's header contains the offsets
of its boxes (``disk.tensorfile``), but not the full sizes of tensors: PyTorch's own reader uses the
largest offset it finds.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from ...errors import CheckpointError, counted
from ...parallel.sharding import Box, is_covered_once
from ...storage import files
from ..disk import strict_json, tensorfile
from ..disk.folder import (
    ADAPTER,
    MODEL,
    MODEL_INDEX,
    PICKLES,
    TRAINER_STATE,
    FolderWeights,
    StoredBox,
    TensorLocation,
    load_trainer_state,
    open_checkpoint,
    places,
    tensors_in,
)
from ..disk.manifest import MANIFEST, STATE, is_plain_name
from ..disk.tensorfile import INFO_KEY, SHAPE_KEY, START_KEY, integers
from ..state.roles import MODEL as MODEL_ROLE
from ..state.roles import part_of, role_of

if TYPE_CHECKING:
    from ...schema.locations import ModelPath

Locations = Mapping[str, TensorLocation]  # by name


@dataclass(frozen=True)
class SavedFolder:
    """One save of a training: what to open, and its description."""

    path: Path
    step: int | None
    num_bytes: int


# Options by their names, for what the files of a folder do not say: how other ranks cut them, say.
Reading: TypeAlias = "Mapping[str, ModelPath]"
AS_STORED: Reading = {}


class Layout(ABC):
    """A kind of folder of weights."""

    name: ClassVar[str]
    """As in ``LAYOUTS`` and in ``--json``."""

    title: ClassVar[str]
    """For people."""

    written_by: ClassVar[str] = "Trainer"
    """Who writes runs of it, in ``ckpt ls``."""

    has_manifest: ClassVar[bool] = False
    """Whether hashes, states and the parent are in a manifest: a Surefoot checkpoint."""

    is_adapter: ClassVar[bool] = False
    """Whether its weights are always those of an adapter."""

    has_adapter_config: ClassVar[bool] = False
    """Whether its ``adapter_config.json`` means that the weights are an adapter's."""

    is_assembled: ClassVar[bool] = False
    """Whether Surefoot joins its files for transformers, if ``model.safetensors`` is missing."""

    is_whole_model: ClassVar[bool] = False
    """Whether such a folder is all of a model or adapter, not only its weights."""

    pickle_suffixes: ClassVar[tuple[str, ...]] = PICKLES
    """Of files beside its weights that are pickles."""

    def read_as(self, reading: Reading) -> Layout:
        """The same layout, whose folders are read by those of the options that it has. Raises
        ``CheckpointError`` if one has an invalid value."""
        return self

    @abstractmethod
    def recognise(self, folder: Path) -> bool:
        """Whether ``folder`` has files of this layout. The first of ``LAYOUTS`` counts. Reads names
        only."""

    @abstractmethod
    def open(self, folder: Path) -> FolderWeights:
        """The weights, by the names in the files; a ``CheckpointError`` if they are damaged."""

    def open_all(self, folder: Path, roles: frozenset[str] | None) -> Locations:
        """Every tensor by its full name, ``role/name``, of all networks, or of some ``roles``."""
        if roles is not None and MODEL_ROLE not in roles:
            return {}
        return {f"{MODEL_ROLE}/{name}": place for name, place in self.open(folder).tensors.items()}

    def states(self, folder: Path) -> Mapping[str, Any]:
        """The states without their tensors, or what the folder logged of its training."""
        return logged_states(folder)

    def small_file(self, folder: Path, name: str) -> bytes | None:
        """The content of a file beside the weights; None if there is none."""
        return read_small(folder, name)

    def why_not(self, folder: Path) -> str | None:
        """Why a folder that looks like one of its kind cannot be read; None if none does."""
        return None

    def names_save(self, path: Path) -> bool:
        """Whether the name of a file selects one save of the folder that contains it."""
        return False

    def model_near(self, folder: Path) -> Path | None:
        """The folder with the ``config.json`` of a model: ``folder``, or one around it."""
        return folder if files.exists(folder / "config.json") else None

    def saves_in(self, folder: Path) -> Sequence[SavedFolder]:
        """The saves of a training in one folder; none if every save has a folder of its own."""
        return ()


def logged_states(folder: Path) -> Mapping[str, Any]:
    """What the Hugging Face Trainer logged, if it did."""
    if not files.exists(folder / TRAINER_STATE):
        return {}
    return {"trainer_state": load_trainer_state(folder)}


def read_small(folder: Path, name: str) -> bytes | None:
    """The content of a file; None if there is none."""
    if not files.exists(folder / name):
        return None
    with files.open_file(folder / name) as file:
        return files.read_all(file, strict_json.MAX_BYTES)


@dataclass(frozen=True)
class Native(Layout):
    """A Surefoot checkpoint."""

    name = "native"
    title = "Surefoot"
    written_by = ""
    has_manifest = True
    has_adapter_config = True
    is_assembled = True
    is_whole_model = True

    def recognise(self, folder: Path) -> bool:
        """Whether it has a manifest or, if it is damaged, the state file."""
        return files.exists(folder / MANIFEST) or files.exists(folder / STATE)

    def open(self, folder: Path) -> FolderWeights:
        """The model, or the adapter."""
        with files.raising(CheckpointError):
            checkpoint = open_checkpoint(folder)
        return FolderWeights(
            self.name, folder, places(checkpoint, checkpoint.manifest.tensors(MODEL_ROLE))
        )

    def open_all(self, folder: Path, roles: frozenset[str] | None) -> Locations:
        """What the manifest lists; files of other roles are not opened."""
        checkpoint = open_checkpoint(folder)
        pieces = checkpoint.manifest.by_tensor()
        chosen = {n: p for n, p in pieces.items() if roles is None or part_of(role_of(n)) in roles}
        return places(checkpoint, chosen)

    def states(self, folder: Path) -> Mapping[str, Any]:
        """All states of the run."""
        checkpoint = open_checkpoint(folder)
        return checkpoint.skeleton() if STATE in checkpoint.manifest.files else {}

    def small_file(self, folder: Path, name: str) -> bytes | None:
        """A file that the manifest lists, checked against its hash."""
        checkpoint = open_checkpoint(folder)
        return checkpoint.small(name) if name in checkpoint.manifest.files else None


def has_model(folder: Path) -> bool:
    """Whether ``from_pretrained`` finds weights in it."""
    return any(files.exists(folder / name) for name in (MODEL, MODEL_INDEX))


def _open_shards(folder: Path) -> dict[str, TensorLocation]:
    where = folder / MODEL_INDEX
    index = strict_json.read_object(where)
    names = index.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
        raise CheckpointError(f"{where}: weight_map must map tensor names to file names")
    for name in sorted(set(names.values())):
        # The index of a stranger must not lead out of its folder (decisions/0013).
        if not is_plain_name(name) or "/" in name:
            raise CheckpointError(f"{where}: {name[:200]!r} is not a file in this folder")
    opened = {n: tensorfile.open_path(folder / n) for n in sorted(set(names.values()))}
    tensors = {}
    for tensor, name in names.items():
        entry = opened[name].header.entries.get(tensor)
        if entry is None:
            raise CheckpointError(
                f"{folder / name}: according to the index, {tensor[:200]!r} must be in this file"
            )
        tensors[tensor] = TensorLocation(opened[name], tensor, entry)
    return tensors_in(list(opened.values()), tensors)


@dataclass(frozen=True)
class HuggingFace(Layout):
    """A Hugging Face model."""

    name = "huggingface"
    title = "Hugging Face"
    is_whole_model = True

    def recognise(self, folder: Path) -> bool:
        """Whether it has ``model.safetensors`` or its index."""
        return has_model(folder)

    def open(self, folder: Path) -> FolderWeights:
        """The weights. Like in transformers, the single file wins over the index."""
        with files.raising(CheckpointError):
            if not files.exists(folder / MODEL):
                return FolderWeights(self.name, folder, _open_shards(folder))
            return FolderWeights(
                self.name, folder, tensors_in([tensorfile.open_path(folder / MODEL)])
            )


@dataclass(frozen=True)
class PEFT(Layout):
    """A PEFT adapter."""

    name = "peft"
    title = "PEFT adapter"
    is_adapter = True
    has_adapter_config = True
    is_whole_model = True

    def recognise(self, folder: Path) -> bool:
        """Whether it has an adapter."""
        return files.exists(folder / ADAPTER)

    def open(self, folder: Path) -> FolderWeights:
        """The adapter's tensors under PEFT's names."""
        with files.raising(CheckpointError):
            file = tensorfile.open_path(folder / ADAPTER)
        return FolderWeights(self.name, folder, tensors_in([file]))


@dataclass(frozen=True)
class DCP(Layout):
    """A distributed checkpoint of PyTorch with Hugging Face storage."""

    name = "dcp"
    title = "PyTorch DCP"
    written_by = ""

    def recognise(self, folder: Path) -> bool:
        """Whether it has files ``shard-00001-model-00001-of-00001.safetensors``."""
        return bool(shard_files(folder))

    def open(self, folder: Path) -> FolderWeights:
        """The tensors, each joined from its boxes."""
        with files.raising(CheckpointError):
            return FolderWeights(self.name, folder, locations(open_boxes(folder)))


_FILE = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True)
class DcpChunk:
    """One box of a tensor of ``shape``, in a file under the tensor's name."""

    file: tensorfile.TensorFile
    shape: tuple[int, ...]
    box: Box


def file_name(rank: int) -> str:
    """PyTorch's name of the file of a rank, without its ending."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001"


def shard_files(folder: Path) -> list[str]:
    """The files of boxes in ``folder``, by their names."""
    return [name for name in files.names_in(folder) if _FILE.fullmatch(name)]


def open_boxes(folder: Path) -> dict[str, list[DcpChunk]]:
    """The boxes of every tensor; a ``CheckpointError`` if they do not cover it."""
    chunks: dict[str, list[DcpChunk]] = {}
    for name in shard_files(folder):
        file = tensorfile.open_path(folder / name)
        for key, (shape, box) in _boxes(file).items():
            chunks.setdefault(key, []).append(DcpChunk(file, shape, box))
    if not chunks:
        raise CheckpointError(
            f"{folder}: it contains no boxes of tensors ({file_name(0)}.safetensors)"
        )
    return {name: _whole(folder, name, boxes) for name, boxes in chunks.items()}


def _boxes(file: tensorfile.TensorFile) -> Mapping[str, tuple[tuple[int, ...], Box]]:
    """Each tensor's full shape, as far as this file knows it, and the box in it."""
    where = f"{file.path}: {INFO_KEY}"
    text = file.header.metadata.get(INFO_KEY, "{}")
    sharding_info = strict_json.parse_object(text.encode(), where)
    boxes = {}
    for key, entry in file.header.entries.items():
        info: Any = sharding_info.get(key, {START_KEY: [0] * len(entry.shape)})
        if not isinstance(info, dict):
            raise CheckpointError(f"{where}: {key[:200]!r} must have {START_KEY}")
        start = integers(info.get(START_KEY), len(entry.shape), f"{where}: {key[:200]!r}")
        box = Box(start, entry.shape)
        shape = info.get(SHAPE_KEY, list(box.stop))
        boxes[key] = integers(shape, len(entry.shape), f"{where}: {key[:200]!r}"), box
    return boxes


def _whole(folder: Path, name: str, boxes: Sequence[DcpChunk]) -> list[DcpChunk]:
    """The boxes that cover one tensor; of equal ones the first."""
    where = f"{folder}: tensor {name[:200]!r}"
    kinds = {(chunk.file.entry(name).dtype, len(chunk.shape)) for chunk in boxes}
    if len(kinds) > 1:
        raise CheckpointError(f"{where} has boxes of different types or numbers of dimensions")
    shape = tuple(map(max, zip(*(chunk.shape for chunk in boxes), strict=True)))
    # Backwards, so that of equal boxes the first one stays.
    apart = {chunk.box: DcpChunk(chunk.file, shape, chunk.box) for chunk in reversed(boxes)}
    filled = [apart[box] for box in sorted(apart) if box.size] or [*apart.values()][:1]
    if not is_covered_once(Box.whole(shape), [chunk.box for chunk in filled]):
        raise CheckpointError(
            f"{where}: its {counted(len(filled), 'box does', 'boxes do')} not cover {list(shape)} "
            "exactly once; is the file of a rank missing, or of another save?"
        )
    return filled


def locations(tensors: Mapping[str, Sequence[DcpChunk]]) -> dict[str, TensorLocation]:
    """Tensors that are several boxes in files."""
    located = {}
    for name, boxes in tensors.items():
        first = boxes[0]
        entry = first.file.entry(name)
        parts = tuple(StoredBox(box.file, name, box.box) for box in boxes) if len(boxes) > 1 else ()
        located[name] = TensorLocation(
            first.file, name, replace(entry, shape=first.shape), None, parts
        )
    return located
