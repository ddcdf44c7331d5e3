"""The token cache: encoded datasets on disk, one folder each, read in place.

The name of a folder is the fingerprint of all inputs of its content. It is written to a temporary
folder and renamed when all of it is on the disk, so it is either complete or absent. All of its
bytes are hashed when it is opened, and a damaged dataset is encoded again. Any folder may be
deleted at any time.

    <fingerprint>/header.json            names, sizes and hashes of the files below; the report
    <fingerprint>/<feature>.tokens       int32, all items concatenated
    <fingerprint>/<feature>.bytes        uint8, the same for a feature that is text, not tokens
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
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...batch import Features
from ...errors import DataError
from ...log import announced
from ...storage import files
from ...storage.remote import default_cache
from ..data_order import Index, scrambled
from ..example import JSON

logger = logging.getLogger(__name__)

VERSION = 2  # of the layout of a folder
HEADER, ROWS, OFFSETS = "header.json", "rows", ".offsets"
TOKENS, BYTES = ".tokens", ".bytes"
KINDS: Mapping[str, type[np.int32] | type[np.uint8]] = {TOKENS: np.int32, BYTES: np.uint8}
SUMS = ".sums"  # of blocks of a file; folders of before 27 November 2026 have them
MAX_HEADER = 1 << 30  # bytes; it holds a line for every broken row
POLL_SECONDS = 0.1
CHUNK = 4 << 20  # bytes that are hashed at a time
SKETCHED = 4096  # items whose tokens are read at a time, for their sketches
Changed: TypeAlias = "Callable[[EncodedStore], str | None]"  # of what a dataset was made from
_PLACES, _FACTOR = 4, 1_000_003  # of a sketch: its tokens, less one, and its base


@dataclass(frozen=True)
class Cached:
    """The content of one folder of the cache."""

    store: EncodedStore
    report: JSON  # what the builder said about it
    is_new: bool = False


def default_folder() -> Path:
    """The default cache, ``surefoot/data`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    return default_cache().with_name("data")


def _nothing(_store: EncodedStore) -> str | None:
    return None


def load_or_build(
    root: Path,
    fingerprint: str,
    build: Callable[[Writer], JSON],
    changed: Changed = _nothing,
) -> Cached:
    """The cached dataset of ``fingerprint``; if there is none, or something has ``changed``,
    ``build`` writes it.

    If several processes need it at the same time, one builds and the others wait for it.
    """
    folder = root / fingerprint
    if (cached := find(root, fingerprint, changed)) is not None:
        return cached
    with files.raising(DataError, "data.cache_dir"):
        files.make_folder(root)
        with _alone(folder.with_name(f"{fingerprint}.lock")) as is_alone:
            try:
                return _open(folder, changed)
            except DamagedCacheError as error:
                if files.exists(folder):
                    logger.warning("%s is %s (%s): encoding it again", folder, error.how, error)
            if is_alone:
                _remove_leftovers(folder)
            return _build(folder, build, changed)


def find(root: Path, fingerprint: str, changed: Changed = _nothing) -> Cached | None:
    """The cached dataset of ``fingerprint``; None if it is missing or damaged, or if something has
    ``changed``."""
    with files.raising(DataError, "data.cache_dir"), contextlib.suppress(DamagedCacheError):
        return _open(root / fingerprint, changed)
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
            column.file.close()

    def append(self, features: Mapping[str, FlatLists], rows: Index) -> None:
        """Append items, by feature, and the rows from which they come."""
        if not features:
            return
        if not self._columns:
            self._columns = {
                name: _Column(self._folder, name, BYTES if lists.flat.dtype == np.uint8 else TOKENS)
                for name, lists in features.items()
            }
        for name, column in self._columns.items():
            column.add(features[name])
        self._rows.frombytes(rows.tobytes())

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


class FlatLists(NamedTuple):
    """Lists of tokens, or texts in bytes, end to end."""

    flat: NDArray[np.int32] | NDArray[np.uint8]
    lengths: Index  # of each list


def flattened(items: Sequence[Features]) -> dict[str, FlatLists]:
    """By feature, the lists of ``items``, which all have the same features."""
    features = {}
    for name, value in items[0].items() if items else ():
        lists = [item[name] for item in items]
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        numbers, count = chain.from_iterable(lists), int(lengths.sum())
        features[name] = FlatLists(
            np.fromiter(numbers, np.uint8, count)
            if isinstance(value, bytes)
            else np.fromiter(numbers, np.int32, count),
            lengths,
        )
    return features


class _Written(NamedTuple):
    size: int
    digest: str


class _Column:
    """One feature's tokens or bytes, written at once; their offsets are written at the end."""

    def __init__(self, folder: Path, name: str, suffix: str) -> None:
        self._folder, self._name, self._suffix = folder, name, suffix
        self.file = files.create(folder / f"{name}{suffix}")
        self._hash, self._size = files.Hash(), 0
        self._lengths = array("q")

    def add(self, lists: FlatLists) -> None:
        assert lists.flat.dtype == KINDS[self._suffix]
        data = lists.flat.data.cast("B")
        self.file.write_at(self._size, data)
        self._hash.update(data)
        self._size += lists.flat.nbytes
        self._lengths.frombytes(lists.lengths.tobytes())

    def finish(self) -> dict[str, _Written]:
        self.file.sync()
        offsets = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)])
        written = {f"{self._name}{self._suffix}": _Written(self._size, self._hash.hexdigest())}
        return written | _write_index(self._folder, f"{self._name}{OFFSETS}", offsets)


def _write_index(folder: Path, name: str, index: Index) -> dict[str, _Written]:
    data = index.tobytes()
    files.write_new(folder / name, data)
    return {name: _Written(len(data), files.digest(data))}


def _open(folder: Path, changed: Changed = _nothing) -> Cached:
    """Open a folder. Raises ``DamagedCacheError`` unless all of its bytes are as written, and
    nothing outside that they depend on has ``changed``."""
    features, indexes = dict[str, Ragged](), dict[str, Index]()
    equal: dict[_Written, Index] = {}  # such as the offsets of tokens and labels: once in memory
    try:
        header = _read_header(folder / HEADER)
        # without the hashes of blocks, so that a dataset has the content that checkpoints name
        parts = {n: _Written(*e) for n, e in header["files"].items() if not n.endswith(SUMS)}
        stored = {name: _checked(folder / name, written) for name, written in parts.items()}
        for name, written in parts.items():
            if Path(name).suffix not in KINDS:
                indexes[name] = equal.setdefault(written, stored[name][:])
        for name in header["features"]:
            flat = next(stored[name + suffix] for suffix in KINDS if name + suffix in stored)
            features[name] = Ragged(flat, indexes[name + OFFSETS])
    except FileNotFoundError as error:
        raise DamagedCacheError(f"no {Path(error.filename).name}") from error
    except OSError as error:  # a folder in place of a file, a disk that cannot read it
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise DamagedCacheError(str(error.strerror)) from error
    listed = {name: list(written) for name, written in parts.items()}
    store = EncodedStore(features, indexes[ROWS], files.digest(_canonical(listed)))
    if (name := changed(store)) is not None:
        raise StaleCacheError(f"picture {name} has changed since it was encoded")
    return Cached(store, header["report"])


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


def _checked(path: Path, written: _Written) -> StoredNumbers:
    """A file whose bytes have the length and the hash with which they were written."""
    file, digest = files.open_file(path), files.Hash()
    if file.size != written.size:
        raise DamagedCacheError(f"{path.name} has {file.size} bytes, not {written.size}")
    buffer = memoryview(bytearray(min(CHUNK, written.size)))
    try:
        for start in range(0, written.size, CHUNK):
            part = buffer[: written.size - start]
            file.read_into(start, part)
            digest.update(part)
    except OSError as error:
        raise DamagedCacheError(f"{path.name}: {error.strerror}") from error
    if digest.hexdigest() != written.digest:
        raise DamagedCacheError(f"{path.name} does not match its checksum")
    dtype = np.dtype(KINDS.get(path.suffix, np.int64))
    return StoredNumbers(file, dtype, written.size // dtype.itemsize)


def _build(folder: Path, build: Callable[[Writer], JSON], changed: Changed) -> Cached:
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    try:
        files.make_folder(aside)
        with Writer(aside) as writer:
            writer.finish(build(writer))
        _commit(aside, folder, changed)
    finally:
        files.remove_tree(aside)
    return replace(_open(folder), is_new=True)


def _commit(aside: Path, folder: Path, changed: Changed) -> None:
    """Rename a finished folder to its final name, unless another process was faster."""
    try:
        files.rename(aside, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        with contextlib.suppress(DamagedCacheError):
            _open(folder, changed)
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
    with announced("another process that is encoding the same dataset"):
        while True:
            file = files.open_or_create(path)
            try:
                is_locked = file.lock()
            except BlockingIOError:
                file.close()
                time.sleep(POLL_SECONDS)
                continue
            if not is_locked or file.is_at(path):
                break
            file.close()  # of the process that had the lock, which has deleted it since
    try:
        yield is_locked
    finally:
        files.remove_tree(path)
        file.close()


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True, eq=False)
class StoredNumbers:
    """The numbers of a file, as an array of which slices without a step can be read.

    They are read from the disk, not mapped: a file that is truncated while it is in use is noticed,
    where a mapping would end the process (SIGBUS).
    """

    file: files.File
    dtype: np.dtype[Any]
    length: int  # as it was written, whatever becomes of the file

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> NDArray[Any]:
        start, stop, step = part.indices(self.length)
        assert step == 1, "every number of a slice is read"
        width = self.dtype.itemsize
        data = np.empty(max(0, stop - start) * width, np.uint8)
        try:
            self.file.read_into(start * width, data.data)
        except OSError as error:
            raise DataError(
                f"data.cache_dir: {self.file.path}: {error.strerror}; start the same command "
                "again: it checks all files, and encodes a damaged dataset again"
            ) from error
        data.flags.writeable = False
        return data.view(self.dtype)


class DamagedCacheError(Exception):
    """A file is missing, or differs from what was written."""

    how: ClassVar[str] = "damaged"


class StaleCacheError(DamagedCacheError):
    """What the dataset was made from has changed."""

    how = "stale"


# Tokens and lengths; bytes, such as the JSON that a reward reads; precomputed outputs of a model.
Array = NDArray[np.int32] | NDArray[np.uint8] | NDArray[np.float32] | NDArray[np.float64]
Flat = Array | StoredNumbers  # in memory, or in the cache
FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


class Ragged(NamedTuple):
    """Concatenated lists of numbers: list i is ``flat[offsets[i]:offsets[i + 1]]``."""

    flat: Flat
    offsets: Index  # [lists + 1]


RowHashes: TypeAlias = "NDArray[np.uint64]"


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

    @property
    def sketches(self) -> Index:
        """[items] A number of the tokens of each item, all its ``input_ids`` together, of which it
        reads a few: items of other numbers have other tokens."""
        total = np.zeros(len(self), np.int64)
        for name, (flat, offsets) in self.features.items():
            if not name.endswith("input_ids"):
                continue
            for first in range(0, len(self), SKETCHED):
                starts = offsets[first : first + SKETCHED + 1]
                tokens = np.append(flat[int(starts[0]) : int(starts[-1])], 0)
                lengths, part = np.diff(starts), total[first : first + SKETCHED]
                steps = np.maximum(lengths - 1, 0)
                part += lengths
                for place in range(_PLACES + 1):
                    part *= _FACTOR  # modulo 2 ** 64
                    at = starts[:-1] - starts[0] + steps * place // _PLACES
                    part += np.where(lengths > 0, tokens[at], 0)
        return total

    def row_hashes(self) -> RowHashes:
        """[rows] A hash of the items that come from each row; 0 for a row that has none. Another
        one if any number of its items is, or its place in them."""
        total = np.zeros(len(self), np.uint64)
        for name, (flat, offsets) in sorted(self.features.items()):
            of_name = np.uint64(int(files.digest(name.encode())[:16], 16))
            for first in range(0, len(self), SKETCHED):
                starts = offsets[first : first + SKETCHED + 1]
                numbers = np.ascontiguousarray(flat[int(starts[0]) : int(starts[-1])])
                places = np.arange(len(numbers)) - np.repeat(
                    starts[:-1] - starts[0], np.diff(starts)
                )
                bits = numbers.view(f"u{numbers.itemsize}").astype(np.uint64)
                keys = scrambled(scrambled(places.astype(np.uint64) ^ of_name) + bits)
                sums = np.concatenate([[np.uint64(0)], np.cumsum(keys, dtype=np.uint64)])
                ends = sums[starts - starts[0]]
                total[first : first + SKETCHED] += ends[1:] - ends[:-1]  # modulo 2 ** 64
        hashes = np.zeros(int(self.rows[-1]) + 1 if len(self) else 0, np.uint64)
        order = np.arange(len(self)) - np.searchsorted(self.rows, self.rows)  # of items of one row
        np.add.at(hashes, self.rows, scrambled(total + order.astype(np.uint64)))
        return hashes


def num_tokens(features: Features) -> int:
    """Tokens of one item, all its ``input_ids`` (or ``..._input_ids``) together."""
    return sum(len(ids) for name, ids in features.items() if name.endswith("input_ids"))
