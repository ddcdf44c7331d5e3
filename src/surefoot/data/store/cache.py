"""The token cache: encoded datasets on disk, one folder each, read in place.

The name of a folder is the fingerprint of all inputs of its content. It is written to a temporary
folder and renamed when all of it is on the disk, so it is either complete or absent. Later damage
is detected, at the latest when the damaged part is first read, and the dataset is encoded again.
Any folder may be deleted at any time.

    <fingerprint>/header.json            names, sizes and hashes of the files below; the report
    <fingerprint>/<feature>.tokens       int32, all items concatenated
    <fingerprint>/<feature>.bytes        uint8, the same for a feature that is text, not tokens
    <fingerprint>/<feature>.sums         uint64, the hash of each block of the file above
    <fingerprint>/<feature>.offsets      int64, where each item begins, and the end
    <fingerprint>/rows                   int64, the row that each item comes from
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import secrets
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...batch import Features
from ...errors import DataError
from ...storage import files
from ...storage.address import default_cache
from ..data_order import Index
from ..example import JSON

logger = logging.getLogger(__name__)

VERSION = 2  # of the layout of a folder
HEADER, ROWS, TOKENS, OFFSETS = "header.json", "rows", ".tokens", ".offsets"
BYTES, SUMS = ".bytes", ".sums"
KINDS: Mapping[str, type[np.int32] | type[np.uint8]] = {TOKENS: np.int32, BYTES: np.uint8}
MAX_HEADER = 1 << 30  # bytes; it holds a line for every broken row
POLL_SECONDS = 0.1
BLOCK = 64 << 10  # bytes: hashed in 5 us; of a shuffled file, an example is in one or two blocks
Sums = NDArray[np.uint64]
Repair = Callable[[str], None]  # writes the files of a folder again, given the reason


@dataclass(frozen=True)
class Cached:
    """The content of one folder of the cache."""

    store: EncodedStore
    report: JSON  # what the builder said about it
    is_new: bool = False


def default_folder() -> Path:
    """The default cache, ``surefoot/data`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    return default_cache().with_name("data")


def load_or_build(
    root: Path, fingerprint: str, build: Callable[[Writer], JSON], *, is_checked: bool = False
) -> Cached:
    """The cached dataset of ``fingerprint``; if there is none, ``build`` writes it, and again if it
    turns out to be damaged while it is read. ``is_checked`` checks all bytes first, not each block
    when it is read.

    If several processes need it at the same time, one builds and the others wait for it.
    """
    folder = root / fingerprint

    def repair(_why: str) -> None:
        load_or_build(root, fingerprint, build, is_checked=True)

    with files.raising(DataError, "data.cache_dir"):
        with contextlib.suppress(DamagedCacheError):
            return _open(folder, repair, is_checked=is_checked)
        files.make_folder(root)
        with _alone(folder.with_name(f"{fingerprint}.lock")) as is_alone:
            try:
                return _open(folder, repair, is_checked=is_checked)
            except DamagedCacheError as error:
                if files.exists(folder):
                    logger.warning("%s is damaged (%s): encoding it again", folder, error)
            if is_alone:
                _remove_leftovers(folder)
            return _build(folder, build, repair)


def find(root: Path, fingerprint: str, repair: Repair) -> Cached | None:
    """The cached dataset of ``fingerprint``; None if it is missing or damaged. ``repair`` builds it
    again if it turns out to be damaged while it is read."""
    with files.raising(DataError, "data.cache_dir"), contextlib.suppress(DamagedCacheError):
        return _open(root / fingerprint, repair)
    return None


class Writer:
    """Appends items to the files of a folder that is being built."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._columns: dict[str, _Column] = {}
        self._rows = array("q")

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for column in self._columns.values():
            column.close()

    def add(self, items: Sequence[Features], rows: Sequence[int]) -> None:
        """Append items, which all have the same features, and the rows from which they come."""
        if not items:
            return
        if not self._columns:
            self._columns = {
                name: _Column(self._folder, name, BYTES if isinstance(value, bytes) else TOKENS)
                for name, value in items[0].items()
            }
        for name, column in self._columns.items():
            column.add([item[name] for item in items])
        self._rows.extend(rows)

    def finish(self, report: JSON) -> None:
        """Write the indexes and the header, and return when all of it is on the disk."""
        written: dict[str, _Written] = {}
        for column in self._columns.values():
            written |= column.finish()
        written |= _write_index(self._folder, ROWS, np.array(self._rows, np.int64))
        header = {
            "version": VERSION,
            "features": list(self._columns),
            "files": {name: list(entry) for name, entry in written.items()},
            "report": report,
        }
        body = _canonical(header)
        files.write_new(self._folder / HEADER, _canonical({**header, "check": files.digest(body)}))
        files.sync_folder(self._folder)


class _Written(NamedTuple):
    size: int
    digest: str


class _Column:
    """One feature's tokens or bytes, written at once; their offsets are written at the end."""

    def __init__(self, folder: Path, name: str, suffix: str) -> None:
        self._folder, self._name, self._suffix = folder, name, suffix
        self._file = files.create(folder / f"{name}{suffix}")
        self._hash, self._blocks, self._size = files.Hash(), BlockHash(), 0
        self._lengths = array("q")

    def close(self) -> None:
        self._file.close()

    def add(self, lists: Sequence[Sequence[int]]) -> None:
        lengths = array("q", map(len, lists))
        flat = np.fromiter(chain.from_iterable(lists), KINDS[self._suffix], sum(lengths))
        data = flat.data.cast("B")
        self._file.write_at(self._size, data)
        self._hash.update(data)
        self._blocks.update(data)
        self._size += flat.nbytes
        self._lengths.extend(lengths)

    def finish(self) -> dict[str, _Written]:
        self._file.sync()
        offsets = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)])
        written = {f"{self._name}{self._suffix}": _Written(self._size, self._hash.hex())}
        written |= _write_index(self._folder, f"{self._name}{SUMS}", self._blocks.sums())
        return written | _write_index(self._folder, f"{self._name}{OFFSETS}", offsets)


def _write_index(folder: Path, name: str, index: Index | Sums) -> dict[str, _Written]:
    data = index.tobytes()
    files.write_new(folder / name, data)
    return {name: _Written(len(data), files.digest(data))}


def _open(folder: Path, repair: Repair, *, is_checked: bool = False) -> Cached:
    """Open a folder. Raises ``DamagedCacheError`` unless its header, sizes and indexes are as
    written, and all bytes if that ``is_checked``."""
    try:
        header = _read_header(folder / HEADER)
        parts = {name: _Written(*entry) for name, entry in header["files"].items()}
        indexes = _read_indexes(folder, parts)
        features = dict[str, Ragged]()
        for file in (f"{name}{suffix}" for name in header["features"] for suffix in KINDS):
            if file in parts:
                path, name = folder / file, Path(file).stem
                opened, sums = _opened(path, parts[file]), indexes[name + SUMS]
                numbers = CheckedFile(opened, path, KINDS[path.suffix], sums, repair)
                if is_checked:
                    numbers.check()
                features[name] = Ragged(numbers, indexes[name + OFFSETS])
    except FileNotFoundError as error:
        raise DamagedCacheError(f"no {Path(error.filename).name}") from error
    listed = {name: entry for name, entry in header["files"].items() if not name.endswith(SUMS)}
    content = files.digest(_canonical(listed))  # as it was before blocks had hashes
    return Cached(EncodedStore(features, indexes[ROWS], content), header["report"])


def _read_header(path: Path) -> dict[str, Any]:
    with files.open_file(path) as file:
        try:
            header = json.loads(files.read_all(file, MAX_HEADER))
        except ValueError as error:
            raise DamagedCacheError(f"{HEADER} is not JSON") from error
    check = header.pop("check", None) if isinstance(header, dict) else None
    if check != files.digest(_canonical(header)):
        raise DamagedCacheError(f"{HEADER} does not match its checksum")
    if header["version"] != VERSION:
        raise DamagedCacheError(f"version {header['version']} instead of {VERSION}")
    return header  # type: ignore[no-any-return]


def _read_indexes(folder: Path, parts: Mapping[str, _Written]) -> dict[str, NDArray[Any]]:
    """Offsets, rows and hashes of blocks, in memory; equal ones once, such as the offsets of tokens
    and labels."""
    known: dict[tuple[type[np.generic], _Written], NDArray[Any]] = {}
    found = {}
    for name, written in parts.items():
        if (path := folder / name).suffix in KINDS:
            continue
        kind: type[np.generic] = np.uint64 if path.suffix == SUMS else np.int64
        numbers = np.frombuffer(_read_index(path, written), kind)
        found[name] = known.setdefault((kind, written), numbers)
    return found


def _read_index(path: Path, written: _Written) -> bytes:
    with _opened(path, written) as file:
        try:
            data = file.read(0, written.size)
        except OSError as error:
            raise DamagedCacheError(f"{path.name}: {error.strerror}") from error
    if files.digest(data) != written.digest:
        raise DamagedCacheError(f"{path.name} does not match its checksum")
    return data


def _opened(path: Path, written: _Written) -> files.File:
    file = files.open_file(path)
    if file.size != written.size:
        raise DamagedCacheError(f"{path.name} has {file.size} bytes, not {written.size}")
    return file


def _build(folder: Path, build: Callable[[Writer], JSON], repair: Repair) -> Cached:
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    try:
        files.make_folder(aside)
        with Writer(aside) as writer:
            writer.finish(build(writer))
        _commit(aside, folder, repair)
    finally:
        files.remove_tree(aside)
    return replace(_open(folder, repair), is_new=True)


def _commit(aside: Path, folder: Path, repair: Repair) -> None:
    """Rename a finished folder to its final name, unless another process was faster."""
    try:
        files.rename(aside, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        with contextlib.suppress(DamagedCacheError):
            _open(folder, repair, is_checked=True)
            return
        files.remove_tree(folder)
        files.rename(aside, folder)
    files.sync_folder(folder.parent)


def _remove_leftovers(folder: Path) -> None:
    """Delete the leftovers of killed processes that were building this folder."""
    for name in files.list_folder(folder.parent):
        if name.startswith(f".{folder.name}.") and name.endswith(".part"):
            files.remove_tree(folder.parent / name)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Wait until no other process is building. False if the file system does not support locks."""
    has_said_so = False
    while (lock := _try_lock(path)) is None:
        if not has_said_so:
            logger.info("waiting for another process that is encoding the same dataset")
        has_said_so = True
        time.sleep(POLL_SECONDS)
    file, is_locked = lock
    try:
        yield is_locked
    finally:
        files.remove_tree(path)
        file.close()


def _try_lock(path: Path) -> tuple[files.File, bool] | None:
    """The lock file and whether it is locked; None if another process has it or deletes it."""
    with contextlib.suppress(FileExistsError):
        files.create(path).close()
    try:
        file = files.open_file(path, write=True)
    except FileNotFoundError:
        return None
    try:
        is_locked = file.lock()
    except BlockingIOError:
        file.close()
        return None
    if is_locked and not file.is_at(file.path):
        file.close()
        return None
    return file, is_locked


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


class BlockHash:
    """xxh3-64 of each block of the bytes that are added, one after another."""

    def __init__(self) -> None:
        self._state, self._filled = xxhash.xxh3_64(), 0
        self._sums = array("Q")

    def update(self, data: memoryview) -> None:
        """Add ``data``."""
        while data:
            part = data[: BLOCK - self._filled]
            self._state.update(part)
            self._filled, data = self._filled + len(part), data[len(part) :]
            if self._filled == BLOCK:
                self._end_block()

    def sums(self) -> Sums:
        """The hash of each block, the last of which may be shorter."""
        if self._filled:
            self._end_block()
        return np.array(self._sums, np.uint64)

    def _end_block(self) -> None:
        self._sums.append(self._state.intdigest())
        self._state, self._filled = xxhash.xxh3_64(), 0


class CheckedFile:
    """The numbers of a file, as an array of which slices without a step can be read. They are
    hashed block by block: while they are written, and again when a block is first read.

    Slices are read from the disk, not mapped: a file that is truncated while it is in use is
    noticed, where a mapping would end the process (SIGBUS).
    """

    def __init__(
        self, file: files.File, path: Path, dtype: type[np.generic], sums: Sums, repair: Repair
    ) -> None:
        """``path`` is where the file is found again after a ``repair``."""
        self.dtype, self._num_bytes = np.dtype(dtype), file.size
        self._file, self._path, self._sums, self._repair = file, path, sums, repair
        self._is_checked = bytearray(len(sums))  # 1 for each block that was; quicker than an array
        self._lock = Lock()  # of the repair: a thread may read ahead

    def __len__(self) -> int:
        return self._num_bytes // self.dtype.itemsize

    def __getitem__(self, part: slice) -> NDArray[Any]:
        width, file = self.dtype.itemsize, self._file
        start, stop, step = part.indices(len(self))
        assert step == 1, "every number of a slice is read"
        start, end = start * width, max(start, stop) * width
        try:
            numbers = self._read(file, start, end)
        except DamagedCacheError as error:
            numbers = self._read(self._mended(file, error), start, end)
        numbers.flags.writeable = False
        return numbers.view(self.dtype)

    def check(self) -> None:
        """Check all blocks. Raises ``DamagedCacheError``."""
        for start in range(0, self._num_bytes, 64 * BLOCK):
            self._read(self._file, start, min(start + 64 * BLOCK, self._num_bytes))

    def _read(self, file: files.File, start: int, end: int) -> NDArray[np.uint8]:
        """The bytes from ``start`` to ``end``. With blocks that were not read yet, complete blocks
        are read, and hashed."""
        first, last = start // BLOCK, -(-end // BLOCK)
        if 0 not in self._is_checked[first:last]:
            return self._bytes(file, start, end)
        low = first * BLOCK
        data = self._bytes(file, low, min(last * BLOCK, self._num_bytes))
        for block in range(first, last):
            piece = data[block * BLOCK - low : (block + 1) * BLOCK - low]
            if xxhash.xxh3_64_intdigest(piece.data) != self._sums[block]:
                raise DamagedCacheError(f"{self._path.name} does not match its checksum")
            self._is_checked[block] = 1
        return data[start - low : end - low]

    def _bytes(self, file: files.File, start: int, end: int) -> NDArray[np.uint8]:
        data = np.empty(end - start, np.uint8)
        try:
            file.read_into(start, data.data)
        except OSError as error:
            raise DamagedCacheError(f"{self._path.name}: {error.strerror}") from error
        return data

    def _mended(self, damaged: files.File, why: DamagedCacheError) -> files.File:
        """The file as it is after a repair. Raises ``DataError``: there is nothing that repairs it,
        or its numbers are others now."""
        with self._lock:
            if self._file is damaged:  # else another thread was faster
                self._repair(str(why))
                with files.raising(DataError, "data.cache_dir"):
                    self._file = files.open_file(self._path)
                self._is_checked = bytearray(len(self._sums))
                try:
                    self.check()
                except DamagedCacheError as error:
                    raise DataError(
                        f"data.cache_dir: {self._path.parent}: {error}, even after its dataset "
                        "was encoded again: the dataset gives other tokens now, or the disk fails"
                    ) from error
            return self._file


class DamagedCacheError(Exception):
    """A file is missing, or differs from what was written."""


# Tokens and lengths; bytes, such as the JSON that a reward reads; precomputed outputs of a model.
Array = NDArray[np.int32] | NDArray[np.uint8] | NDArray[np.float32] | NDArray[np.float64]
Flat = Array | CheckedFile  # in memory, or in the cache
_PROBES, _FACTOR = 16, np.uint64(0x9E3779B97F4A7C15)  # of 2^64, the golden ratio
FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


class Ragged(NamedTuple):
    """Concatenated lists of numbers: list i is ``flat[offsets[i]:offsets[i + 1]]``."""

    flat: Flat
    offsets: Index  # [lists + 1]


@dataclass(frozen=True)
class EncodedStore:
    """The items of one dataset, by feature."""

    features: Mapping[str, Ragged]
    rows: Index  # [items] the row of the dataset that each item comes from
    content: str  # hash of all of it

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Features:
        return {
            name: flat[offsets[index] : offsets[index + 1]]  # type: ignore[misc]
            for name, (flat, offsets) in self.features.items()
        }

    @property
    def lengths(self) -> Index:
        """[items] tokens of each item, all its ``input_ids`` (or ``..._input_ids``) together."""
        total = np.zeros(len(self), np.int64)
        for name, ragged in self.features.items():
            if name.endswith("input_ids"):
                total += np.diff(ragged.offsets)
        return total

    def probes(self) -> NDArray[np.uint64]:
        """See ``EncodedDataset.probes``."""
        flat, offsets = self.features["input_ids"]
        lengths, tokens = np.diff(offsets), flat[:]
        found = lengths.astype(np.uint64)
        for part in range(_PROBES):
            places = offsets[:-1] + (lengths - 1) * part // (_PROBES - 1)
            found = found * _FACTOR + tokens[places].astype(np.uint64)
        return found


def num_tokens(features: Features) -> int:
    """Tokens of one item, all its ``input_ids`` (or ``..._input_ids``) together."""
    return sum(len(ids) for name, ids in features.items() if name.endswith("input_ids"))
