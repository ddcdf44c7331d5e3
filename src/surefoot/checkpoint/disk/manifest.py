"""The manifest: all files and boxes of a checkpoint, as objects and as text.

``manifest.json`` has a seal: the xxh3-128 of its own bytes, computed with the seal's 32 digits as
zeros. So every bit of the manifest is covered. The manifest covers every file's length, every small
file and every header by a hash, and every piece of a tensor by a hash.

With many ranks, most pieces follow from a ``Grid``. Then the manifest covers the hash list of each
rank, and the list covers the rank's pieces. Lists are read when a piece is needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import Any, Literal, get_args

from ...errors import CheckpointError, counted
from ...parallel.sharding import Box, is_covered_once
from ...storage import files
from . import strict_json
from .grid import HASH_LIST, RANK_FOLDER, Grid, ShardingRule, num_blocks, parse_grid
from .tensorfile import ITEM_SIZES, integers, is_size, num_bytes, sizes

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = "surefoot-checkpoint"
VERSION = (1, 1)  # a reader takes any minor version of its major one
MAX_SMALL = 1 << 30  # bytes of a file that is hashed as a whole
Kind = Literal["full", "adapter"]
Layout = Literal["full", "distributed"]  # whole tensors, or boxes of them in a folder a rank

_SEAL = "0" * 32
_HASH = re.compile(r"[0-9a-f]{32}")
_OF_RANK = re.compile(r"rank_([0-9]{5})/[^/]+\.safetensors")
_NAME = re.compile(r"[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]{0,200}")


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of a tensor, and its hash. In ``file``, ``key`` is the box or the full tensor."""

    tensor: str  # "ROLE/...", for one "model/...": unique in the checkpoint
    dtype: str  # safetensors' name for it
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    file: str
    key: str
    hash: str
    blocks: tuple[str, ...] = ()  # hashes of each 64 KiB of it; only in hash lists

    @property
    def num_bytes(self) -> int:
        """Length of the stored bytes."""
        return num_bytes(self.dtype, self.box.shape)

    def inside(self, stored: tuple[int, ...]) -> Box:
        """The box in the tensor under the key, which has the shape ``stored``."""
        return Box.whole(stored) if stored == self.box.shape else self.box


@dataclass(frozen=True)
class Pieces:
    """The pieces of one tensor; together they cover it. Those of a rule are made when they are
    needed, from the hash lists of their ranks."""

    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    near: Callable[[Box], Iterator[Piece]]
    """Those that have elements of a box; all of a tensor without elements."""

    def __iter__(self) -> Iterator[Piece]:
        return self.near(Box.whole(self.shape))

    @property
    def num_bytes(self) -> int:
        """Length of the full tensor."""
        return num_bytes(self.dtype, self.shape)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint except its bytes."""

    step: int
    kind: Kind
    created: str  # UTC, ISO 8601
    versions: Mapping[str, str]  # of the libraries that wrote it
    files: Mapping[str, int]  # name -> bytes; all files but the manifest
    hashes: Mapping[str, str]  # of whole small files, and of what precedes the data in safetensors
    pieces: Sequence[Piece]  # those that do not follow from the grid
    parent: str | None = None
    layout: Layout = "full"
    world_size: int = 1  # of the run that wrote it; no reader needs it, nor the mesh
    mesh: Mapping[str, int] = field(default_factory=dict)
    grid: Grid | None = None
    read_list: Callable[[int], Mapping[str, Piece]] | None = field(
        default=None, compare=False, repr=False
    )  # what a rank of the grid has written, by tensor; of an opened checkpoint

    @property
    def is_adapter(self) -> bool:
        """Whether its weights are an adapter's."""
        return self.kind == "adapter"

    @property
    def companions(self) -> list[str]:
        """The files that have neither tensors nor their hashes, and are copied as they are."""
        return [
            name for name in self.files if not (is_safetensors(name) or name in self.hash_lists)
        ]

    def pieces_in(self, file: str) -> dict[str, tuple[Piece, ...]]:
        """The pieces of one file by their key there."""
        return _grouped(self.pieces_of(file), lambda piece: piece.key)

    def pieces_of(self, file: str) -> tuple[Piece, ...]:
        """The pieces in one file; those in a rank's file are in its hash list."""
        explicit, match = self._by_file.get(file, ()), _OF_RANK.fullmatch(file)
        if self.grid is None or match is None or int(match[1]) >= self.grid.size:
            return explicit
        written = self.written_by(int(match[1])).values()
        return (*explicit, *(piece for piece in written if piece.file == file))

    @cached_property
    def _by_file(self) -> Mapping[str, tuple[Piece, ...]]:
        return _grouped(self.pieces, lambda piece: piece.file)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of its tensors, in alphabetical order."""
        return tuple(sorted({name.partition("/")[0] for name in self.by_tensor()}))

    def tensors(self, role: str) -> dict[str, Pieces]:
        """The pieces of each tensor of one role, by the rest of its name."""
        start, by_name = f"{role}/", dict[str, Pieces]()
        for name, pieces in self.by_tensor().items():
            if name.startswith(start):
                by_name[name.removeprefix(start)] = pieces
        return by_name

    def by_tensor(self) -> dict[str, Pieces]:
        """The pieces of each tensor by its full name; together they cover it."""
        return self._by_tensor

    @cached_property
    def _by_tensor(self) -> dict[str, Pieces]:
        by_tensor = _grouped(self.pieces, lambda piece: piece.tensor)
        return {name: _explicit(pieces) for name, pieces in by_tensor.items()} | {
            rule.tensor: Pieces(rule.dtype, rule.shape, partial(self._near, rule))
            for rule in (self.grid.rules if self.grid else ())
        }

    def _near(self, rule: ShardingRule, box: Box) -> Iterator[Piece]:
        for rank, _ in self.grid.ranks_of(rule, box) if self.grid else ():
            if rank not in self._lists:
                self._lists[rank] = self.written_by(rank)
            yield self._lists[rank][rule.tensor]

    def written_by(self, rank: int) -> Mapping[str, Piece]:
        """What a rank of the grid has written, by tensor."""
        assert self.read_list is not None, "the checkpoint was not opened"
        return self._lists.get(rank) or self.read_list(rank)

    @cached_property
    def _lists(self) -> dict[int, Mapping[str, Piece]]:
        return {}

    @cached_property
    def hash_lists(self) -> Mapping[str, int]:
        """The file of each hash list, and the rank that has written it."""
        return {HASH_LIST.format(rank): rank for rank in range(self.grid.size if self.grid else 0)}


def _explicit(pieces: tuple[Piece, ...]) -> Pieces:
    def find(box: Box) -> Iterator[Piece]:
        return (piece for piece in pieces if not piece.box.size or piece.box & box)

    return Pieces(pieces[0].dtype, pieces[0].shape, find)


def _grouped(pieces: Iterable[Piece], key: Callable[[Piece], str]) -> dict[str, tuple[Piece, ...]]:
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(key(piece), []).append(piece)
    return {name: tuple(group) for name, group in groups.items()}


_KEYS = [f.name for f in fields(Manifest) if f.name not in ("grid", "read_list")]


def is_plain_name(name: str) -> bool:
    """Whether ``name`` can only be a file inside its folder, on any system."""
    parts = name.split("/")
    return len(parts) <= 4 and all(_NAME.fullmatch(part) for part in parts)


def is_safetensors(name: str) -> bool:
    """Whether a file of that name contains tensors: its hash covers only the bytes before them."""
    return name.endswith(".safetensors")


def dump(manifest: Manifest) -> bytes:
    """The manifest's text, sealed: sorted keys and one entry per line, for people and ``diff``."""
    content: dict[str, Any] = {name: getattr(manifest, name) for name in _KEYS}
    content |= {} if manifest.grid is None else manifest.grid.dump()
    pieces = sorted(manifest.pieces, key=lambda piece: (piece.tensor, piece.box))
    content |= {"pieces": list(map(dump_piece, pieces)), "seal": _SEAL, "format": FORMAT}
    # Only what an earlier reader cannot read has the later version.
    content |= {"version": "1.0" if manifest.grid is None else ".".join(map(str, VERSION))}
    lines = (f"{json.dumps(name)}: {_lines(content[name])}" for name in sorted(content))
    data = ("{\n" + ",\n".join(lines) + "\n}\n").encode()
    return data.replace(_SEAL.encode(), files.digest(data).encode())


def dump_piece(piece: Piece) -> dict[str, Any]:
    """A piece in the form of the manifest."""
    return {
        "box": [list(piece.box.start), list(piece.box.shape)],
        "dtype": piece.dtype,
        "file": piece.file,
        "hash": piece.hash,
        "key": piece.key,
        "shape": list(piece.shape),
        "tensor": piece.tensor,
    }


def _lines(value: object) -> str:
    if isinstance(value, Mapping) and value:
        rows = (f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(value.items()))
        return "{\n" + ",\n".join(rows) + "\n}"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"  {json.dumps(v, sort_keys=True)}" for v in value) + "\n]"
    return "{}" if isinstance(value, Mapping) else json.dumps(value)


def parse(data: bytes, where: str, *, is_part: bool = False) -> Manifest:
    """Parse a manifest, and reject one that is damaged, of a later format, or inconsistent. With
    ``is_part`` it is what one rank has written, so that tensors need not be complete."""
    raw = strict_json.parse_object(data, where)
    # The version comes first: a later format may have another seal, and
    # the message must name the format.
    _check_version(raw, where)
    _check_seal(data, raw.get("seal"), where)
    _check_fields(raw, where)
    pieces = [parse_piece(p, f"{where}: piece {i}") for i, p in enumerate(raw["pieces"])]
    grid = parse_grid(raw, raw["mesh"], where) if "rules" in raw else None
    field_values = {name: raw[name] for name in _KEYS}
    manifest = Manifest(**{**field_values, "pieces": tuple(pieces), "grid": grid})
    check_consistent(manifest, where, is_part=is_part)
    return manifest


def _check_version(raw: Mapping[str, Any], where: str) -> None:
    if raw.get("format") != FORMAT:
        raise CheckpointError(
            f"{where}: format is {str(raw.get('format'))[:40]!r}, expected {FORMAT!r}"
        )
    version = raw.get("version")
    if not isinstance(version, str) or not re.fullmatch(r"\d{1,9}\.\d{1,9}", version):
        raise CheckpointError(
            f"{where}: version is {str(version)[:40]!r}, expected for example '1.0'"
        )
    if int(version.split(".")[0]) > VERSION[0]:
        versions = raw.get("versions")
        writer = versions.get("surefoot", "later") if isinstance(versions, dict) else "later"
        raise CheckpointError(
            f"{where}: format version {version} was written by Surefoot {str(writer)[:40]}; this "
            f"one reads version {VERSION[0]}: install surefoot {str(writer)[:40]} or newer"
        )


# The seal is inside: a second file with the manifest's hash could be lost or out of step, and which
# of the two would count then (docs/decisions/0010)?
def _check_seal(data: bytes, seal: object, where: str) -> None:
    if not isinstance(seal, str) or not _HASH.fullmatch(seal):
        raise CheckpointError(f"{where}: it has no seal; the file is damaged")
    digits = seal.encode()
    # Once: a second copy of the digits would become zeros, too, and could hide a change.
    if data.count(digits) != 1 or files.digest(data.replace(digits, _SEAL.encode())) != seal:
        raise CheckpointError(f"{where}: its seal does not match its content; the file is damaged")


def _check_fields(raw: Mapping[str, Any], where: str) -> None:
    def is_map(kind: Any) -> Any:
        return lambda value: isinstance(value, dict) and all(map(kind, value.values()))

    def is_text(value: object) -> bool:
        return isinstance(value, str)

    expected = {
        "created": is_text,
        "files": is_map(is_size),
        "hashes": is_map(lambda value: isinstance(value, str) and _HASH.fullmatch(value)),
        "kind": lambda value: value in get_args(Kind),
        "layout": lambda value: value in get_args(Layout),
        "mesh": is_map(is_size),
        "parent": lambda value: value is None or isinstance(value, str),
        "pieces": lambda value: isinstance(value, list),
        "step": is_size,
        "versions": is_map(is_text),
        "world_size": is_size,
    }
    for name, is_good in expected.items():
        if name not in raw:
            raise CheckpointError(f"{where}: {name} is missing")
        if not is_good(raw[name]):
            raise CheckpointError(f"{where}: {name} cannot be {str(raw[name])[:80]!r}")


def parse_piece(raw: object, where: str) -> Piece:
    """Parse a piece; a ``CheckpointError`` that names ``where`` if it is invalid."""
    names = {"box", "dtype", "file", "hash", "key", "shape", "tensor"}
    if not isinstance(raw, dict) or raw.keys() != names:
        raise CheckpointError(f"{where}: expected the fields {', '.join(sorted(names))}")
    if not all(isinstance(raw[name], str) for name in names - {"box", "shape"}):
        raise CheckpointError(f"{where}: all fields except box and shape must be text")
    if raw["dtype"] not in ITEM_SIZES:
        raise CheckpointError(f"{where}: unknown dtype {raw['dtype'][:40]!r}")
    if not _HASH.fullmatch(raw["hash"]):
        raise CheckpointError(f"{where}: {raw['hash'][:40]!r} is not an xxh3-128 in hexadecimal")
    shape = sizes(raw["shape"], f"{where}: shape")
    if not isinstance(raw["box"], list) or len(raw["box"]) != 2:
        raise CheckpointError(f"{where}: box must be a start and a shape")
    start, extent = (integers(side, len(shape), f"{where}: box") for side in raw["box"])
    text = {name: raw[name] for name in ("tensor", "dtype", "file", "key", "hash")}
    return Piece(shape=shape, box=Box(start, extent), **text)


def parse_list(data: bytes, grid: Grid, rank: int, where: str) -> dict[str, Piece]:
    """The pieces in the hash list of ``rank``, by tensor; a ``CheckpointError`` if it is not what
    the rules say that the rank has."""
    boxes, pieces = grid.boxes_of(rank), dict[str, Piece]()
    for file, hashes in strict_json.parse_object(data, where).items():
        if not isinstance(hashes, dict):
            raise CheckpointError(f"{where}: {file[:80]!r} must map tensors to hashes")
        for tensor, entry in hashes.items():
            if tensor in pieces or tensor not in boxes:
                problem = "is in two files" if tensor in pieces else f"is not of rank {rank}"
                raise CheckpointError(f"{where}: {tensor[:200]!r} {problem}")
            rule, box = grid.rule_of[tensor], boxes[tensor]
            count = 1 + num_blocks(num_bytes(rule.dtype, box.shape))
            is_list = isinstance(entry, list) and len(entry) == count
            if not is_list or not all(isinstance(h, str) and _HASH.fullmatch(h) for h in entry):
                raise CheckpointError(f"{where}: {tensor[:200]!r} must have {count} hashes")
            file_name, key = f"{RANK_FOLDER.format(rank)}/{file}", tensor.partition("/")[2]
            pieces[tensor] = Piece(
                tensor, rule.dtype, rule.shape, box, file_name, key, entry[0], tuple(entry[1:])
            )
    if missing := [tensor for tensor in boxes if tensor not in pieces]:
        raise CheckpointError(f"{where}: the box of {missing[0][:200]!r} of rank {rank} is missing")
    return pieces


def check_consistent(manifest: Manifest, where: str, *, is_part: bool = False) -> None:
    """Check that names stay in the folder, pieces have files, and tensors are covered once (unless
    it ``is_part`` of a checkpoint only)."""
    for name, size in manifest.files.items():
        if not is_plain_name(name) or name == MANIFEST:
            raise CheckpointError(
                f"{where}: {name[:200]!r} is not the name of a file inside the folder"
            )
        if size > MAX_SMALL and not is_safetensors(name):
            raise CheckpointError(
                f"{where}: {name[:200]!r} has {size} bytes, more than {MAX_SMALL}"
            )
    for name in manifest.files.keys() ^ manifest.hashes.keys():
        raise CheckpointError(f"{where}: {name[:200]!r} has a length or a hash, but not both")
    for piece in manifest.pieces:
        if piece.file not in manifest.files or not is_safetensors(piece.file):
            raise CheckpointError(
                f"{where}: {piece.tensor[:200]!r} is in {piece.file[:200]!r}, which is not a "
                "file of this checkpoint"
            )
    if is_part:
        return
    if manifest.grid is not None:
        _check_grid(manifest, manifest.grid, where)
    for name, pieces in _grouped(manifest.pieces, lambda piece: piece.tensor).items():
        _check_pieces(pieces, f"{where}: tensor {name[:200]!r}", manifest.layout)


def _check_grid(manifest: Manifest, grid: Grid, where: str) -> None:
    if manifest.layout != "distributed" or manifest.world_size != grid.size:
        raise CheckpointError(
            f"{where}: rules of {grid.size} ranks in layout {manifest.layout} of "
            f"{manifest.world_size}"
        )
    for name in manifest.hash_lists:
        if name not in manifest.files:
            raise CheckpointError(f"{where}: {name}, the hash list of a rank, is missing")
    for piece in manifest.pieces:
        if piece.tensor in grid.rule_of:
            raise CheckpointError(f"{where}: {piece.tensor[:200]!r} has a rule and pieces")


def _check_pieces(pieces: Sequence[Piece], where: str, layout: Layout) -> None:
    """Check that pieces cover one tensor once: from one place or, if distributed, each its own."""
    first = pieces[0]
    places = {(piece.file, piece.key) for piece in pieces}
    if layout == "full" and len(places) > 1:
        raise CheckpointError(
            f"{where} is stored in several places, which layout full does not allow"
        )
    if any((piece.dtype, piece.shape) != (first.dtype, first.shape) for piece in pieces):
        raise CheckpointError(f"{where} has pieces of different types or full shapes")
    if 1 < len(places) < len(pieces):
        raise CheckpointError(f"{where} has two pieces in one place")
    # By the signs of their corners: linear in the number of boxes, for any cut (decisions/0015).
    if not is_covered_once(Box.whole(first.shape), [piece.box for piece in pieces]):
        parts = counted(len(pieces), "piece does", "pieces do")
        raise CheckpointError(f"{where}: its {parts} not cover it exactly once")
