"""Rows from memory, written into the folder of the run.

A run reads datasets from files: whoever resumes or evaluates it finds the same rows again, and
another content has another name, so that it is noticed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import xxhash

from ...data.rows.formats.fields import Row, shown
from ...data.rows.recognition import FORMS, LOOK, recognized
from ...data.section import DataSection
from ...errors import DataError, RunError
from ...schema.locations import DatasetReference
from ...storage import files

# Rows, as a ``datasets.Dataset`` has them, or columns, as a ``pandas.DataFrame`` does.
Rows: TypeAlias = "Iterable[Mapping[str, object]] | Mapping[str, Sequence[object]]"


def with_rows(section: DataSection, given: Mapping[str, Rows], folder: Path) -> DataSection:
    """``section``, whose datasets named in ``given`` are entries of these rows, written below
    ``folder``. Its other datasets stay. Raises ``DataError`` for rows that no file can contain, or
    of no known form."""
    contents = {name: _text(name, rows) for name, rows in given.items()}
    digest = xxhash.xxh3_128()
    for name, text in contents.items():
        digest.update(f"{name}:{len(text)}:".encode() + text)
    target = (folder / f"datasets-{digest.hexdigest()[:12]}").absolute()
    with files.raising(RunError, f"train.output_dir: cannot write in {folder}"):
        files.make_folder(target)
        for name, text in contents.items():
            files.write_aside(target / f"{name}.jsonl", text)

    def entry(reference: DatasetReference) -> DatasetReference:
        if (name := str(reference)) not in contents:
            return reference
        return DatasetReference.of({"name": name, "file_name": str(target / f"{name}.jsonl")})

    return replace(
        section,
        datasets=tuple(map(entry, section.datasets)),
        eval_datasets=tuple(map(entry, section.eval_datasets)),
    )


def _text(name: str, rows: Rows) -> bytes:
    """The rows as lines of JSON."""
    lines = list[str]()
    for index, row in enumerate(_plain(name, rows)):
        if not isinstance(row, Mapping):
            raise DataError(f"{name}: row {index}: expected a mapping of columns, got {shown(row)}")
        try:
            lines.append(json.dumps(dict(row), default=_number))
        except (TypeError, ValueError) as error:
            raise DataError(f"{name}: row {index}: {error}; use text, numbers and lists") from None
    if not lines:
        raise DataError(f"{name}: has no rows")
    _check_form(name, [json.loads(line) for line in lines[:LOOK]])
    return ("\n".join(lines) + "\n").encode()


def _check_form(name: str, rows: Sequence[Row]) -> None:
    """Raise ``DataError`` if no format has the columns of ``rows``."""
    if recognized(rows) is None:
        columns = dict.fromkeys(column for row in rows for column in row)
        raise DataError(
            f"{name}: its columns are {', '.join(columns)}; expected one of these forms: "
            f"{'; '.join(FORMS)}. Rename the columns, or write a file and describe it by an entry "
            "in data.datasets"
        )


def _plain(name: str, rows: Rows) -> Rows:
    """The rows themselves, whatever form ``datasets`` would give them; of a DataFrame or of columns
    what stands side by side."""
    for package in ("pandas", "polars"):
        if (frames := sys.modules.get(package)) and isinstance(rows, frames.DataFrame):
            frame: Any = rows
            if package == "polars":
                return list[Row](frame.to_dicts())
            return list[Row](frame.astype(object).where(frame.notna(), None).to_dict("records"))
    if isinstance(rows, Mapping) and not isinstance(rows, _dataset_dicts()):
        return _of_columns(name, rows)
    datasets = sys.modules.get("datasets")  # nobody has one of its objects who has not imported it
    if datasets is None:
        return rows
    if isinstance(rows, datasets.DatasetDict | datasets.IterableDatasetDict):
        splits = ", ".join(rows)
        raise DataError(f"{name}: expected one split, got all of them; take one of: {splits}")
    return rows.with_format(None) if isinstance(rows, datasets.Dataset) else rows


def _dataset_dicts() -> tuple[type, ...]:
    datasets = sys.modules.get("datasets")
    return () if datasets is None else (datasets.DatasetDict, datasets.IterableDatasetDict)


def _of_columns(name: str, columns: Mapping[str, object]) -> list[dict[str, object]]:
    """The rows of columns. Raises ``DataError`` if they are no lists of equal length."""
    lists = {key: [*value] for key, value in columns.items() if _is_column(value)}
    if len(lists) < len(columns) or len({len(values) for values in lists.values()}) != 1:
        sizes = (f"{key}: {_size(value)}" for key, value in columns.items())
        raise DataError(
            f"{name}: expected rows, or for each column a list, all of equal length, got "
            f"{{{', '.join(sizes)}}}"
        )
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]


def _is_column(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)


def _size(value: object) -> str:
    return f"{len(value)} values" if _is_column(value) else shown(value)


def _number(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a value is of type {type(value).__name__}")
