"""The datasets of a recipe: names in ``dataset_info.json``, files, hub ids and entries of its own.

All problems are reported at once.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from glob import has_magic
from pathlib import Path
from typing import TypeVar

from ...errors import DataError, did_you_mean
from ...schema.locations import DATA_FILES, DatasetReference
from ...storage import files
from ...storage.remote import is_address
from ..example import JSON, BrokenRow, Example
from ..section import DataSection
from ._row_sources import OTHER_FILES, PACKED, refuse_other
from .formats import Format
from .formats.fields import Row
from .registry import FILE, HUBS, DatasetEntry, read_entry, read_form, read_registry
from .rows import ANY, Reading, read_examples

logger = logging.getLogger(__name__)
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
LOOK = 50  # rows that are read to see whether all others can be
T = TypeVar("T")


class Catalog:
    """Finds the datasets that a ``data`` section names."""

    def __init__(self, section: DataSection) -> None:
        self._section = section

    @property
    def entries(self) -> list[DatasetEntry]:
        """Every dataset of the section, once. Raises ``DataError`` with all that are wrong."""
        return all_of([partial(self._open, reference) for reference in self._references])

    def entry(self, name: str) -> DatasetEntry:
        """The dataset that the section calls ``name``, or any other one. Raises ``DataError``: it
        is unknown, or its entry is invalid."""
        return self._open(self._section.reference(name))

    def forms(self) -> list[tuple[Format, tuple[str, ...]]]:
        """The formats of rows that the entries of the section describe, each with the columns that
        its rows must have. The files need not be there."""
        return [form for reference in self._references for form in self._forms(reference)]

    @property
    def _references(self) -> list[DatasetReference]:
        names = (*self._section.datasets, *self._section.eval_datasets)
        return list(dict.fromkeys(map(DatasetReference.of, names)))

    def _forms(self, reference: DatasetReference) -> list[tuple[Format, tuple[str, ...]]]:
        if (written := self._written(reference)) is not None:
            return read_form(*written)
        source = str(reference.source)
        is_name = "/" not in source and Path(source).suffix.lower() not in DATA_FILES
        if is_name and not files.exists(Path(source)):
            logger.warning(
                "dataset %r of the run is not in %s any more, so rows are read by the usual names "
                "of their columns",
                source,
                self._path,
            )
        return []

    def _open(self, reference: DatasetReference) -> DatasetEntry:
        section, written = self._section, self._written(reference)
        if written is None:
            source = str(reference.source)
            path = Path(source)
            is_here = path.is_absolute() and (files.exists(path) or has_magic(source))
            is_on_hub = path.suffix.lower() not in DATA_FILES and HUB_ID.fullmatch(source)
            if not (is_here or is_address(source) or is_on_hub):
                raise self._unknown(source)
            is_file = is_here or is_address(source)
            key = "file_name" if is_file else HUBS[section.hub]
            written = {key: source}, f"data.datasets: {reference}"
        entry, where = written
        return read_entry(
            str(reference), entry, section.dataset_dir, where, section.hub, section.text_unit
        )

    def _written(self, reference: DatasetReference) -> tuple[object, str] | None:
        """The entry of a dataset, in the recipe or in ``dataset_info.json``, and where it stands;
        None if there is none."""
        source, entries = reference.source, self._registry or {}
        if not isinstance(source, str):
            return {k: v for k, v in source.items() if k != "name"}, f"data.datasets: {reference}"
        return (entries[source], f"{self._path}: {source}") if source in entries else None

    @property
    def _path(self) -> Path:
        return self._section.dataset_dir / FILE

    @cached_property
    def _registry(self) -> JSON | None:
        """The entries of the ``dataset_info.json`` of the section, if there is one."""
        return read_registry(self._path) if self._path.exists() else None

    def _unknown(self, source: str) -> DataError:
        folder = self._section.dataset_dir
        refuse_other(Path(source))
        suffixes = [suffix.lower() for suffix in Path(source).suffixes]
        if suffixes[-1:] and suffixes[-1] in PACKED and {*suffixes} & {*DATA_FILES}:
            unpack = PACKED[suffixes[-1]]
            raise DataError(
                f"dataset {source!r}: is compressed; unpack it, and name what comes out: {unpack} "
                f"{source}"
            )
        if files.exists(near := folder / source) and source not in (".", ".."):
            return DataError(f"dataset {source!r}: no such file here; did you mean {near}?")
        near_by = [folder.absolute().parent, Path.cwd()]  # the recipe's, usually, and the current
        if any(files.is_folder(each / source) for each in near_by) and "/" not in source:
            return DataError(
                f"dataset {source!r} is not in {FILE}; did you mean the folder ./{source}?"
            )
        if "/" in source or Path(source).suffix.lower() in DATA_FILES:
            where = dict.fromkeys(each / Path(source).parent for each in near_by)
            names = {p.name: None for each in where if each.is_dir() for p in each.iterdir()}
            looked = " and ".join(map(str, where))
            hint = did_you_mean(Path(source).name, names)
            return DataError(
                f"dataset {source!r}: no such file or folder{hint}; looked in {looked}"
            )
        if self._registry is None:
            return DataError(
                f"dataset {source!r}: no {FILE} in {folder.absolute()}; set data.dataset_dir to "
                "the folder that contains it, or name a file such as rows.jsonl or a hub id such "
                "as tatsu-lab/alpaca"
            )
        more = ", ..." if len(self._registry) > 10 else ""
        listed = ", ".join(list(self._registry)[:10]) + more
        hint = did_you_mean(source, self._registry) or f" (it has {listed})"
        return DataError(f"dataset {source!r} is not in {self._path}{hint}")


def other_rows(path: Path) -> Iterator[Row]:
    """The rows of a file of another program. Raises ``DataError``: it is of no known kind."""
    if path.suffix.lower() not in OTHER_FILES:
        raise DataError(f"{path}: expected one of {', '.join(OTHER_FILES)}")
    return OTHER_FILES[path.suffix.lower()](path)


def training_examples(section: DataSection) -> Iterator[Example]:
    """The rows of the training datasets, one dataset after the other. Raises ``DataError``."""
    catalog = Catalog(section)
    for name in section.datasets:
        every = read_examples(catalog.entry(str(name)), max_broken_rows=section.max_broken_rows)
        yield from (example for example in every if not isinstance(example, BrokenRow))


def check_rows(
    entries: Sequence[DatasetEntry], section: DataSection, reading: Reading = ANY
) -> None:
    """Read the first rows of each dataset. Raises ``DataError`` with all that cannot be used."""

    def first_rows(entry: DatasetEntry) -> None:
        limits = min(LOOK, section.max_samples or LOOK), section.max_broken_rows
        for _ in read_examples(
            entry, max_samples=limits[0], max_broken_rows=limits[1], reading=reading
        ):
            pass

    all_of([partial(first_rows, entry) for entry in entries])


def problems_of(section: DataSection) -> list[str]:
    """What is wrong with the datasets of a section, as far as their first rows show it."""
    try:
        check_rows(Catalog(section).entries, section)
    except DataError as error:
        return [str(error)]
    return []


def all_of(actions: Iterable[Callable[[], T]]) -> list[T]:
    """The results of all actions. Raises ``DataError`` with every one that is raised."""
    results: list[T] = []
    problems: list[str] = []
    for action in actions:
        try:
            results.append(action())
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(dict.fromkeys(problems)))
    return results
