"""Row sources: files of one kind, read one by one, row by row."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

from ...errors import DataError, counted
from ...extensions import Extended
from ...schema.locations import matches
from ...storage import files
from ...storage.files import read_json
from ..example import BrokenRow
from ._readers import READERS, TextUnit, read_txt, text_lines
from .formats.fields import Row

SPLIT_NAMES = ("train", "validation", "test")
# As the hub knows them: a word of its own in the name of a file, or of a folder of files.
SPLIT = re.compile(
    r"(?:^|[-._ /0-9])(?:(train|training)|(validation|valid|dev|val)|"
    r"(test|testing|eval|evaluation))(?=[-._ /0-9]|$)",
    re.IGNORECASE,
)
# Files beside those with rows, in a folder that was downloaded from a hub.
COMPANIONS = re.compile(r"readme(\.\w+)?|licen[sc]e(\.\w+)?|dataset_infos?\.json", re.IGNORECASE)
PACKED = {".gz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd", ".zip": "unzip"}
OTHER_FILES: Mapping[str, Callable[[Path], Iterator[Row]]] = Extended("row_files", {})
SAVED, SPLITS = "state.json", "dataset_dict.json"  # of Dataset and DatasetDict.save_to_disk
SHOWN = 3  # broken rows that are shown
CHUNK = 1 << 22  # bytes that are hashed at a time


def refuse_other(path: Path) -> None:
    """Raise ``DataError`` if it is a file of another program that can be converted."""
    if path.suffix.lower() in OTHER_FILES:
        convert = shlex.join(["surefoot", "data", "convert", str(path), f"{path.stem}.jsonl"])
        raise DataError(
            f"{path}: is not read by training; convert it once, and name that: {convert}"
        )


def first_broken(broken: Sequence[BrokenRow]) -> Iterator[str]:
    """A line for each of the first broken rows."""
    for row in broken[:SHOWN]:
        yield f"  row {row.index}: {row.reason}"


class RowSource(Protocol):
    """A source of rows."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """How it is read, where that is not plain."""

    @property
    def as_entry(self) -> str:
        """What names it in an entry, such as ``file_name: rows.csv``."""

    def rows(self) -> Iterator[Row | BrokenRow]:
        """All rows; raises DataError if the source cannot be read at all."""

    def places(self, numbers: Collection[int]) -> dict[int, str]:
        """Where the rows with these numbers are, in words."""

    def content_hash(self) -> str:
        """Equal only for equal content."""

    def stamp(self) -> str:
        """Changes whenever the content may have changed; no file is read for it."""


@dataclass(frozen=True)
class Files:
    """Files of one kind, read one after another."""

    paths: tuple[Path, ...]
    remarks: tuple[str, ...] = ()  # what is not read of a folder, and what a row is of a text file
    text_unit: TextUnit = "file"  # what a row is of a text file
    address: str | None = None  # from which they were downloaded

    def __str__(self) -> str:
        if self.address is not None:
            return self.address
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return f"{self.paths[0]}{more}"

    def rows(self) -> Iterator[Row | BrokenRow]:
        """All rows; raises DataError if a file is not of its kind."""
        index = 0
        for path in self.paths:
            kind, first = path.suffix.lower(), index
            with files.reading(DataError, lambda: _place(path, index - first)):  # noqa: B023
                lines = read_txt(path, self.text_unit) if kind == ".txt" else READERS[kind](path)
                for row in lines:
                    yield BrokenRow(index, f"{path.name}: {row}") if isinstance(row, str) else row
                    index += 1

    def places(self, numbers: Collection[int]) -> dict[int, str]:
        """The file of each of these rows, and its line there; of a file without lines, its place
        among the rows of the file, of which the first is 1."""
        places, index = dict[int, str](), 0
        for path in self.paths:
            kind = path.suffix.lower()
            is_by_line = kind == ".jsonl" or (kind == ".txt" and self.text_unit == "line")
            rows = read_txt(path, self.text_unit) if kind == ".txt" else READERS[kind](path)
            lines: Iterable[tuple[int, object]] = (
                text_lines(path) if is_by_line else enumerate(rows, 1)
            )
            for number, _ in lines:
                if index in numbers:
                    places[index] = f"{path}: {'line' if is_by_line else 'row'} {number}"
                index += 1
        return places

    @property
    def as_entry(self) -> str:
        """What names it in an entry."""
        path = self.paths[0] if len(self.paths) == 1 else self.paths[0].parent
        return f"file_name: {self.address or path}"

    def content_hash(self) -> str:
        """Hash of the bytes of all files, with their kinds and boundaries."""
        digest = xxhash.xxh3_128()
        for path in self.paths:
            with _reading(path):
                unit = self.text_unit if path.suffix.lower() == ".txt" else ""
                digest.update(f"{path.suffix}{unit}:{path.stat().st_size}:".encode())
                with files.open_stream(path) as file:
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
                traces.append(f"{self.text_unit}:{path.absolute()}:{s.st_size}:{times}:{s.st_ino}")
        return xxhash.xxh3_128_hexdigest("\n".join(traces).encode())


def _reading(path: Path) -> AbstractContextManager[None]:
    return files.reading(DataError, str(path))


def _place(path: Path, num_rows: int) -> str:
    """Where a reader was, of which so many rows have come."""
    return f"{path}: row {num_rows}" if num_rows else str(path)


def find_files(path: Path, split: str | None = None, text_unit: TextUnit = "file") -> Files:
    """The file at ``path``, or the files of the folder there, which must be of one kind, or those
    of a ``split`` of datasets that were saved to the folder."""
    if files.exists(path / SPLITS):
        path, split = path / _known_split(path, split), None
    if files.exists(path / SAVED):
        return Files(_saved(path))
    paths, remarks = _of_split(_paths_at(path), path, split)
    kinds = {p.suffix.lower() for p in paths}
    if len(kinds) > 1:
        what = f"folder {path} contains" if files.is_folder(path) else f"{path} matches"
        raise DataError(f"{what} files of several kinds: {', '.join(sorted(kinds))}")
    if not kinds <= READERS.keys():
        kind_names = ", ".join(kind[1:] for kind in READERS)
        if (unpack := PACKED.get(paths[0].suffix.lower())) is not None:
            raise DataError(f"{paths[0]}: is compressed; unpack it first: {unpack} {paths[0].name}")
        refuse_other(paths[0])
        raise DataError(f"{paths[0]}: expected a file of one of the kinds {kind_names}")
    if kinds == {".txt"} and text_unit == "file":
        remarks += ("each file is one document (data.text_unit: line or paragraph divides it)",)
    return Files(tuple(paths), remarks, text_unit)


def _of_split(
    paths: list[Path], folder: Path, split: str | None
) -> tuple[list[Path], tuple[str, ...]]:
    """The files of a ``split``, by their names; what is to be trained on if none is wanted: no
    files of a split for evaluation. All files if there are no splits."""
    in_folder = paths if files.is_folder(folder) else []
    split_by_path = {path: split_of(str(path.relative_to(folder))) for path in in_folder}
    names = set(split_by_path.values()) - {None}
    if split is not None and names:
        if split not in names:
            splits = ", ".join(name for name in SPLIT_NAMES if name in names)
            raise DataError(f"{folder}: no split {split!r}; its files are of {splits}")
        return [path for path in paths if split_by_path[path] == split], ()
    if split not in (None, "train"):
        raise DataError(f"{folder} has no splits, so not {split!r}; leave split out")
    default_split = "train" if "train" in names else None
    others = [path for path, name in split_by_path.items() if name not in (default_split, None)]
    if not others or len(others) == len(paths):
        return paths, ()
    selected = [path for path in paths if split_by_path[path] == default_split]
    left = ", ".join(str(path.relative_to(folder)) for path in paths if path not in selected)
    return selected, (
        f"{folder}: {'files of no split' if default_split is None else 'the split train'} "
        f"({counted(len(selected), 'file')}); not {left}",
    )


def split_of(name: str) -> str | None:
    """The split that the name of a file is of, as on a hub; None if of none."""
    match = SPLIT.search(name)
    return SPLIT_NAMES[match.lastindex - 1] if match and match.lastindex else None


def _paths_at(path: Path) -> list[Path]:
    """A file, the files of a folder, or those that a pattern such as ``rows-*.jsonl`` matches."""
    if not files.exists(path):
        matching = matches(path)
        if not matching:
            raise DataError(f"no file or folder {path}")
        return matching
    if files.is_folder(path):
        if data_files := [p for p in _visible(path) if not COMPANIONS.fullmatch(p.name)]:
            return data_files
        inner = [p for p in sorted(path.iterdir()) if files.is_folder(p) and p.name[0] != "."]
        split_folders = [p for p in inner if p.name == "data" or split_of(p.name)]
        if split_files := [p for folder in split_folders for p in _visible(folder)]:
            return split_files
        if inner:
            names = ", ".join(p.name for p in inner)
            raise DataError(f"folder {path} contains no files, but folders; name one: {names}")
        raise DataError(f"folder {path} contains no files")
    if not path.is_file():
        raise DataError(f"{path} is neither a file nor a folder; write its rows to a file first")
    return [path]


def _visible(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))


def _known_split(folder: Path, split: str | None) -> str:
    """The name of a split of datasets that were saved to a folder."""
    splits = _listed(folder / SPLITS, "splits")
    name = split or "train"
    if name not in splits:
        raise DataError(
            f'{folder}: no split {name!r}; add "split" to the entry: one of {", ".join(splits)}'
        )
    return name


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
            content = read_json(path)
        except ValueError as error:
            raise DataError(f"{path}: not valid JSON: {error}") from None
    listed = content.get(key) if isinstance(content, dict) else None
    if not isinstance(listed, list):
        raise DataError(f"{path}: expected an object with a list {key!r}")
    return listed
