"""A folder of tensors opened for reading: where each tensor is, by file, key and box. No torch.

Of a committed checkpoint everything is checked before it is used. The small files beside a model's
weights, such as its tokenizer, are copied unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any

from ...errors import CheckpointError, DamagedFileError
from ...parallel.sharding import Box
from ...storage import files
from . import strict_json, tensorfile
from .commit import check_step, step_of
from .grid import BLOCK, HASH_LIST
from .manifest import MANIFEST, STATE, Manifest, Piece, Pieces, parse, parse_list
from .tensorfile import TensorEntry

_COMMIT = re.compile(r"[0-9a-f]{40}")
TRAINER_STATE = "trainer_state.json"
MODEL = "model.safetensors"
MODEL_INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
DISTRIBUTED = (".metadata", "pytorch_model_fsdp_0")  # of DCP; of the Trainer with FSDP
DEEPSPEED = ("latest", "zero_to_fp32.py")  # beside its checkpoints
OF_DEEPSPEED = ("_model_states.pt", "_optim_states.pt")  # in them
PICKLES = (".bin", ".pt", ".pth", ".ckpt")

WHAT_TO_DO = "the file is damaged; resume from an earlier checkpoint"


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder and its manifest. Files are checked against the manifest as they are opened."""

    path: Path
    manifest: Manifest
    follow: bool = False  # whether files may be links, as in the hub's cache

    def __post_init__(self) -> None:
        if self.manifest.grid is not None:
            # The last one is kept: the files of a rank are read one after another.
            read = lru_cache(maxsize=1)(self._written_by)
            object.__setattr__(self, "manifest", replace(self.manifest, read_list=read))

    def _written_by(self, rank: int) -> dict[str, Piece]:
        grid, name = self.manifest.grid, HASH_LIST.format(rank)
        assert grid is not None
        return parse_list(self.small(name), grid, rank, str(self.path / name))

    def small(self, name: str) -> bytes:
        """The content of a companion or state file, its length and hash checked."""
        with files.raising(CheckpointError), self._open(name) as file:
            size = file.size
            self._check_size(name, size)
            data = file.read(0, size)
        if files.digest(data) != self.manifest.hashes[name]:
            raise self._damaged(f"{self.path / name}: its hash is not the manifest's; {WHAT_TO_DO}")
        return data

    def tensors(self, name: str) -> tensorfile.TensorFile:
        """A file of tensors, length and header checked; hashes are for the reader of a piece."""
        file = tensorfile.opened(self._open(name))
        try:
            self._check_size(name, file.header.file_size)
            self._check_header(name, file)
        except CheckpointError:
            file.close()
            raise
        return file

    def _open(self, name: str) -> files.File:
        if self.follow:
            return files.open_file(self.path / name)
        return files.open_inside(self.path, name)

    def skeleton(self) -> Mapping[str, Any]:
        """The state without its tensors; a ``CheckpointError`` if there are only weights."""
        if STATE not in self.manifest.files:
            setting = "adapter" if self.manifest.is_adapter else "path"
            raise CheckpointError(
                f"{self.path}: a weights-only checkpoint; it has no training state ({STATE}) "
                "and cannot be resumed. To start from its weights, remove checkpoint.resume "
                f"and set model.{setting}={self.path}"
            )
        return strict_json.parse_object(self.small(STATE), str(self.path / STATE))

    def check_stored(
        self, file: tensorfile.TensorFile, piece: Piece, part: Box | None = None
    ) -> None:
        """Read a piece, and reject it if the hash of its bytes differs from the manifest's. Of a
        ``part`` of a piece whose blocks have hashes, only its blocks are read."""
        inside = piece.inside(file.entry(piece.key).shape)
        if part is None or not piece.blocks:
            self.check_piece(piece, file.hash(piece.key, inside))
            return
        for number, digest in file.hash_blocks(piece.key, part.moved_into(piece.box), BLOCK):
            self.check_piece(replace(piece, hash=piece.blocks[number]), digest)

    def check_piece(self, piece: Piece, digest: str) -> None:
        """Reject a piece if the hash of its bytes differs from the manifest's."""
        if piece.hash != digest:
            raise self._damaged(
                f"{self.path / piece.file}: {piece.key!r} has changed since it was saved (hash "
                f"{digest[:8]}…, expected {piece.hash[:8]}…); {WHAT_TO_DO}"
            )

    def _check_size(self, name: str, size: int) -> None:
        expected = self.manifest.files.get(name)
        if size != expected:
            raise self._damaged(
                f"{self.path / name}: {size} bytes, expected {expected}; {WHAT_TO_DO}"
            )

    def _damaged(self, message: str) -> DamagedFileError:
        return DamagedFileError(self.path, message)

    def _check_header(self, name: str, file: tensorfile.TensorFile) -> None:
        where = self.path / name
        if file.head_hash != self.manifest.hashes[name]:
            raise self._damaged(f"{where}: its header is not the one that was saved; {WHAT_TO_DO}")
        pieces = self.manifest.pieces_in(name)
        if odd := sorted(pieces.keys() ^ file.header.entries.keys()):
            raise CheckpointError(
                f"{where}: file and manifest disagree about tensor {odd[0][:200]!r}"
            )
        for key, parts in pieces.items():
            entry, first = file.header.entries[key], parts[0]
            expected = first.box.shape if len(parts) == 1 else first.shape
            if (entry.dtype, entry.shape) != (first.dtype, expected):
                raise CheckpointError(
                    f"{where}: {key!r} is {entry.dtype} {list(entry.shape)}, expected "
                    f"{first.dtype} {list(expected)} as in the manifest"
                )
            if any(piece.tensor != first.tensor for piece in parts):
                raise CheckpointError(
                    f"{where}: {key!r} cannot be both {first.tensor!r} and {parts[-1].tensor!r}"
                )


def is_download(folder: Path) -> bool:
    """Whether ``folder`` is in the cache of a hub: its files are links, and some may be missing."""
    return any(
        # As huggingface_hub lays its cache out: models--owner--name/snapshots/COMMIT.
        parent.name == "snapshots" and _COMMIT.fullmatch(child.name)
        for child, parent in pairwise((folder, *folder.parents))
    )


def open_checkpoint(
    folder: Path, *, follow: bool = False, is_part: bool = False
) -> CheckpointFolder:
    """Open ``folder`` by its manifest; a ``CheckpointError`` if it is not a complete checkpoint,
    or with ``is_part``, not what one rank has written of one. With ``follow``, and in the cache of
    a hub, its files may be links."""
    where, follow = folder / MANIFEST, follow or is_download(folder)
    with files.raising(CheckpointError):
        if not files.exists(where):
            why = f"was never committed: it has no {MANIFEST}"
            why = why if files.exists(folder) else "does not exist"
            raise CheckpointError(f"{folder}: this checkpoint {why}")
        opened = files.open_file(where) if follow else files.open_inside(folder, MANIFEST)
        with opened as file:
            data = files.read_all(file, strict_json.MAX_BYTES)
    manifest = parse(data, str(where), is_part=is_part)
    check_step(folder, str(folder), manifest.step)
    return CheckpointFolder(folder, manifest, follow)


# What lies beside the weights: the tokenizer, its template, processors, and code a model brings.
TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "*.jinja", "chat_template.json", "additional_chat_templates/*"),
)
_PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_BESIDE_MODEL = ("*.py", *_PROCESSOR, "LICENSE*")


def companions_of(model: Path, tokenizer: Path) -> dict[str, bytes]:
    """The companion files of two folders; a processor of pictures beside the tokenizer is the one
    that was trained with."""
    trained = {} if tokenizer == Path() else _matching(tokenizer, _PROCESSOR)
    return {**_matching(model, _BESIDE_MODEL), **trained, **tokenizer_of(tokenizer)}


def tokenizer_of(folder: Path) -> dict[str, bytes]:
    """The files of the tokenizer in ``folder``; none if it is no folder."""
    return {} if folder == Path() else _matching(folder, TOKENIZER)  # "": it was not loaded


def _matching(folder: Path, patterns: Sequence[str]) -> dict[str, bytes]:
    paths = (path for pattern in patterns for path in sorted(folder.glob(pattern)))
    return {
        str(path.relative_to(folder)): files.read_file(path) for path in paths if path.is_file()
    }


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
    checkpoint: CheckpointFolder, tensors: Mapping[str, Pieces]
) -> dict[str, TensorLocation]:
    """The positions of the tensors of a Surefoot checkpoint, each file opened once."""
    found = {name: tuple(pieces) for name, pieces in tensors.items()}
    names = {piece.file for pieces in found.values() for piece in pieces}
    opened = {name: checkpoint.tensors(name) for name in names}
    return {name: _place(pieces, opened) for name, pieces in found.items()}


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


@dataclass(frozen=True)
class TrainerStateFile:
    """The reliable part of ``trainer_state.json``, the log of a run of Surefoot or of the
    Hugging Face Trainer, whatever the file contains; all empty if there is none."""

    step: int | None = None
    best_step: int | None = None
    history: list[object] = field(default_factory=list)

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> TrainerStateFile:
        """Convert untrusted plain data."""
        history = raw.get("log_history")
        return cls(
            _integer(raw.get("global_step")),
            _best(raw),
            history if isinstance(history, list) else [],
        )

    def last(self, metric: str) -> float | None:
        """The last logged value of ``metric``."""
        rows: Iterator[Any] = (
            row.get(metric) for row in reversed(self.history) if isinstance(row, dict)
        )
        return number(next((value for value in rows if value is not None), None))

    def at(self, metric: str, step: int | None) -> float | None:
        """The value of ``metric`` that was logged at exactly this step."""
        return None if step is None else metrics_in(self.history, metric).get(step)


def load_trainer_state(folder: Path) -> dict[str, Any]:
    """The content of the file in a foreign folder. Raises ``CheckpointError``."""
    where = folder / TRAINER_STATE
    with files.raising(CheckpointError), files.open_inside(folder, TRAINER_STATE) as file:
        return strict_json.parse_object(
            files.read_all(file, strict_json.MAX_BYTES), str(where), allow_nan=True
        )


def metrics_in(history: Iterable[object], name: str) -> dict[int, float]:
    """The numbers logged as ``name``, by step, from the records of a log."""
    by_step: dict[int, float] = {}
    for record in history:
        if isinstance(record, dict):
            step, value = record.get("step"), number(record.get(name))
            if type(step) is int and value is not None:
                by_step[step] = value
    return by_step


def number(value: object) -> float | None:
    """``value`` if it is a number that a float can represent, including nan and infinities."""
    # True is an int of Python's; an int of 400 digits, below, is no float.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _integer(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _best(raw: Mapping[str, Any]) -> int | None:
    """The step of the best checkpoint; older Trainers only store its path."""
    path = raw.get("best_model_checkpoint")
    if (step := _integer(raw.get("best_global_step"))) is not None or not isinstance(path, str):
        return step
    step = step_of(Path(PurePath(path).name))
    return step if step >= 0 else None
