"""Row sources: files of one kind, read one by one, row by row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

from ...errors import DataError
from ...schema.locations import matches
from ...storage import files
from .formats.fields import Row
from .readers import READERS

SAVED, SPLITS = "state.json", "dataset_dict.json"  # of Dataset and DatasetDict.save_to_disk
CHUNK = 1 << 22  # bytes that are hashed at a time


@dataclass(frozen=True, slots=True)
class BrokenRow:
    """A row that cannot be read: skipped, counted and reported."""

    index: int  # of the row in its dataset, from 0
    reason: str
    is_dropped: bool = False  # it is as it should be, and has nothing to learn: a null, a flag


class RowSource(Protocol):
    """A source of rows."""

    def rows(self) -> Iterator[Row | BrokenRow]:
        """All rows; raises DataError if the source cannot be read at all."""

    def content_hash(self) -> str:
        """Equal only for equal content."""

    def stamp(self) -> str:
        """Changes whenever the content may have changed; no file is read for it."""


@dataclass(frozen=True)
class Files:
    """Files of one kind, read one after another."""

    paths: tuple[Path, ...]

    def __str__(self) -> str:
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return f"{self.paths[0]}{more}"

    def rows(self) -> Iterator[Row | BrokenRow]:
        """All rows; raises DataError if a file is not of its kind."""
        index = 0
        for path in self.paths:
            with _reading(path):
                for row in READERS[path.suffix.lower()](path):
                    yield BrokenRow(index, f"{path.name}: {row}") if isinstance(row, str) else row
                    index += 1

    def content_hash(self) -> str:
        """Hash of the bytes of all files, with their kinds and boundaries."""
        digest = xxhash.xxh3_128()
        for path in self.paths:
            with _reading(path):
                digest.update(f"{path.suffix}:{path.stat().st_size}:".encode())
                with path.open("rb") as file:
                    while chunk := file.read(CHUNK):
                        digest.update(chunk)
        return digest.hexdigest()

    def stamp(self) -> str:
        """Names, sizes, times and inodes of all files, which change when a file is written."""
        traces = []
        for path in self.paths:
            with _reading(path):
                s = path.stat()
                times = f"{s.st_mtime_ns}:{s.st_ctime_ns}"
                traces.append(f"{path.absolute()}:{s.st_size}:{times}:{s.st_ino}")
        return xxhash.xxh3_128_hexdigest("\n".join(traces).encode())


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def find_files(path: Path, split: str | None = None) -> Files:
    """The file at ``path``, or the files of the folder there, which must be of one kind, or those
    of a ``split`` of datasets that were saved to the folder."""
    if files.exists(path / SPLITS):
        path = path / _known_split(path, split)
    elif split not in (None, "train"):
        raise DataError(f"{path} has no splits, so not {split!r}; leave split out")
    if files.exists(path / SAVED):
        return Files(_saved(path))
    paths = _paths_at(path)
    kinds = {p.suffix.lower() for p in paths}
    if len(kinds) > 1:
        what = f"folder {path} contains" if files.is_folder(path) else f"{path} matches"
        raise DataError(f"{what} files of several kinds: {', '.join(sorted(kinds))}")
    if not kinds <= READERS.keys():
        known = ", ".join(kind[1:] for kind in READERS)
        raise DataError(f"{paths[0]}: expected a file of one of the kinds {known}")
    return Files(tuple(paths))


def _paths_at(path: Path) -> list[Path]:
    """A file, the files of a folder, or those that a pattern such as ``rows-*.jsonl`` matches."""
    if not files.exists(path):
        found = matches(path)
        if not found:
            raise DataError(f"no file or folder {path}")
        return found
    if files.is_folder(path):
        found = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
        if not found:
            raise DataError(f"folder {path} contains no files")
        return found
    if not path.is_file():
        raise DataError(f"{path} is neither a file nor a folder; write its rows to a file first")
    return [path]


def _known_split(folder: Path, split: str | None) -> str:
    """The name of a split of datasets that were saved to a folder."""
    known = _listed(folder / SPLITS, "splits")
    wanted = split or "train"
    if wanted not in known:
        raise DataError(
            f'{folder}: no split {wanted!r}; add "split" to the entry: one of {", ".join(known)}'
        )
    return wanted


def _saved(folder: Path) -> tuple[Path, ...]:
    """The files of a dataset that was saved to a folder, in order."""
    files = _listed(folder / SAVED, "_data_files")
    names = [each.get("filename") if isinstance(each, dict) else None for each in files]
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise DataError(f"{folder / SAVED}: expected the names of the files of a saved dataset")
    return tuple(folder / str(name) for name in names)


def _listed(path: Path, key: str) -> list[Any]:
    """A list in a small JSON file."""
    with _reading(path):
        try:
            found = json.loads(path.read_bytes())
        except ValueError as error:
            raise DataError(f"{path}: not valid JSON: {error}") from None
    listed = found.get(key) if isinstance(found, dict) else None
    if not isinstance(listed, list):
        raise DataError(f"{path}: expected an object with a list {key!r}")
    return listed
