"""The token cache: encoded datasets on disk, one folder each, memory-mapped.

The name of a folder is the fingerprint of all inputs of its content. It is written to a temporary
folder and renamed when all of it is on the disk, so it is either complete or absent. Later damage
is detected, and the dataset is encoded again. Any folder may be deleted at any time.

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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...batch import Features
from ...errors import DataError
from ...storage import files
from ...storage.address import default_cache
from ..data_order import Index
from ..example import JSON
from .dataset import EncodedStore, Ragged

logger = logging.getLogger(__name__)

VERSION = 1  # of the layout of a folder
HEADER, ROWS, TOKENS, OFFSETS = "header.json", "rows", ".tokens", ".offsets"
BYTES = ".bytes"
KINDS: Mapping[str, type[np.int32] | type[np.uint8]] = {TOKENS: np.int32, BYTES: np.uint8}
MAX_HEADER = 1 << 30  # bytes; it holds a line for every broken row
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Cached:
    """The content of one folder of the cache."""

    store: EncodedStore
    report: JSON  # what the builder said about it
    is_new: bool = False


def default_folder() -> Path:
    """The default cache, ``surefoot/data`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    return default_cache().with_name("data")


def load_or_build(root: Path, fingerprint: str, build: Callable[[Writer], JSON]) -> Cached:
    """The cached dataset of ``fingerprint``; if there is none, ``build`` writes it.

    If several processes need it at the same time, one builds and the others wait for it.
    """
    folder = root / fingerprint
    with files.raising(DataError, "data.cache_dir"):
        with contextlib.suppress(_DamagedError):
            return _open(folder)
        files.make_folder(root)
        with _alone(root / f"{fingerprint}.lock") as is_alone:
            try:
                return _open(folder)
            except _DamagedError as error:
                if files.exists(folder):
                    logger.warning("%s is damaged (%s): encoding it again", folder, error)
            if is_alone:
                _remove_leftovers(folder)
            return _build(folder, build)


def find(root: Path, fingerprint: str) -> Cached | None:
    """The cached dataset of ``fingerprint``; None if it is missing or damaged."""
    with files.raising(DataError, "data.cache_dir"), contextlib.suppress(_DamagedError):
        return _open(root / fingerprint)
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
        self._hash, self._size = files.Hash(), 0
        self._lengths = array("q")

    def close(self) -> None:
        self._file.close()

    def add(self, lists: Sequence[Sequence[int]]) -> None:
        lengths = array("q", map(len, lists))
        flat = np.fromiter(chain.from_iterable(lists), KINDS[self._suffix], sum(lengths))
        self._file.write_at(self._size, flat.data.cast("B"))
        self._hash.update(flat.data.cast("B"))
        self._size += flat.nbytes
        self._lengths.extend(lengths)

    def finish(self) -> dict[str, _Written]:
        self._file.sync()
        offsets = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)])
        written = {f"{self._name}{self._suffix}": _Written(self._size, self._hash.hex())}
        return written | _write_index(self._folder, f"{self._name}{OFFSETS}", offsets)


def _write_index(folder: Path, name: str, index: Index) -> dict[str, _Written]:
    data = index.tobytes()
    files.write_new(folder / name, data)
    return {name: _Written(len(data), files.digest(data))}


class _DamagedError(Exception):
    """A folder is missing, or differs from what was written."""


def _open(folder: Path) -> Cached:
    """Map a folder; raises _DamagedError unless its header, sizes and indexes are as written."""
    try:
        header = _read_header(folder / HEADER)
        parts = {name: _Written(*entry) for name, entry in header["files"].items()}
        arrays = {name: _mapped(folder / name, part) for name, part in parts.items()}
    except FileNotFoundError as error:
        raise _DamagedError(f"no {Path(error.filename).name}") from error
    features = {
        name: Ragged(arrays[name + suffix], arrays[name + OFFSETS])
        for name in header["features"]
        for suffix in KINDS
        if name + suffix in arrays
    }
    content = files.digest(_canonical(header["files"]))
    return Cached(EncodedStore(features, arrays[ROWS], content), header["report"])


def _read_header(path: Path) -> dict[str, Any]:
    with files.open_file(path) as file:
        try:
            header = json.loads(files.read_all(file, MAX_HEADER))
        except ValueError as error:
            raise _DamagedError(f"{HEADER} is not JSON") from error
    check = header.pop("check", None) if isinstance(header, dict) else None
    if check != files.digest(_canonical(header)):
        raise _DamagedError(f"{HEADER} does not match its checksum")
    if header["version"] != VERSION:
        raise _DamagedError(f"version {header['version']} instead of {VERSION}")
    return header  # type: ignore[no-any-return]


def _mapped(path: Path, written: _Written) -> NDArray[Any]:
    """The numbers of a file. Indexes are checked by their hash, tokens and bytes by their size."""
    kind: type[np.generic] = KINDS.get(path.suffix, np.int64)
    if path.stat().st_size != written.size:
        raise _DamagedError(f"{path.name} has {path.stat().st_size} bytes, not {written.size}")
    numbers = np.memmap(path, kind, "r").view(np.ndarray) if written.size else np.empty(0, kind)
    if kind is np.int64 and files.digest(numbers.data.cast("B")) != written.digest:
        raise _DamagedError(f"{path.name} does not match its checksum")
    return numbers


def _build(folder: Path, build: Callable[[Writer], JSON]) -> Cached:
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    try:
        files.make_folder(aside)
        with Writer(aside) as writer:
            writer.finish(build(writer))
        built = _open(aside)  # before it gets its name: what is mapped stays, whoever removes it
        _commit(aside, folder)
    finally:
        files.remove_tree(aside)
    return replace(built, is_new=True)


def _commit(aside: Path, folder: Path) -> None:
    """Rename a finished folder to its final name, unless another process was faster."""
    try:
        files.rename(aside, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        with contextlib.suppress(_DamagedError):
            _open(folder)
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
