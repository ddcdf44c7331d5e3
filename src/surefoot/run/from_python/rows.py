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
from typing import TypeAlias

import numpy as np
import xxhash

from ...data.rows.formats.fields import shown
from ...data.rows.registry import FILE, read_registry
from ...data.section import DataSection
from ...errors import DataError, RunError
from ...schema.locations import DatasetReference
from ...storage import files

Rows: TypeAlias = "Iterable[Mapping[str, object]]"  # a ``datasets.Dataset`` is one
# The columns by which the form of rows is known, and its entry in a dataset_info.json.
KNOWN: Mapping[tuple[str, ...], Mapping[str, object]] = {
    ("messages",): {"formatting": "openai"},
    ("conversations",): {"formatting": "sharegpt"},
    ("instruction", "chosen", "rejected"): {"ranking": True},
    ("prompt", "chosen", "rejected"): {"ranking": True, "columns": {"prompt": "prompt"}},
    ("prompt", "completion", "label"): {
        "columns": {"prompt": "prompt", "response": "completion", "kto_tag": "label"}
    },
    ("prompt", "completion"): {"columns": {"prompt": "prompt", "response": "completion"}},
    ("instruction", "output"): {},
    ("text",): {"columns": {"prompt": "text"}},
}


def with_rows(section: DataSection, given: Mapping[str, Rows], folder: Path) -> DataSection:
    """``section``, whose datasets named in ``given`` are these rows, written below ``folder``. Its
    other datasets stay. Raises ``DataError`` for rows that no file can contain."""
    entries, digest = dict[str, object](), xxhash.xxh3_128()
    contents = {name: _lines(name, rows) for name, rows in given.items()}
    for name, (data, columns) in contents.items():
        entries[name] = {"file_name": f"{name}.jsonl", **_entry(name, columns)}
        digest.update(f"{name}:{len(data)}:".encode() + data)
    names = dict.fromkeys((*section.datasets, *section.eval_datasets))
    others = [DatasetReference.of(name) for name in names if name not in given]
    entries |= _entries_of(section, others)
    info = json.dumps(entries, indent=2, sort_keys=True).encode()
    digest.update(info)
    target = folder / f"datasets-{digest.hexdigest()[:12]}"
    with files.raising(RunError, f"train.output_dir: cannot write in {folder}"):
        files.make_folder(target)
        for name, (data, _) in contents.items():
            files.write_aside(target / f"{name}.jsonl", data)
        files.write_aside(target / FILE, info)
    return replace(section, dataset_dir=target.absolute())


def _entries_of(section: DataSection, references: Sequence[DatasetReference]) -> dict[str, object]:
    """The entries of a recipe's own datasets that ``dataset_info.json`` has, their files by
    absolute paths. The others mean the same in any folder."""
    if not (section.dataset_dir / FILE).exists():
        return {}
    registry, found = read_registry(section.dataset_dir), dict[str, object]()
    for name in (one.source for one in references if isinstance(one.source, str)):
        if name not in registry.entries:
            continue
        registry.entry(name)  # says what is wrong with it
        raw = registry.entries[name]
        entry = dict(raw) if isinstance(raw, Mapping) else {}
        if "file_name" in entry:
            entry["file_name"] = str((section.dataset_dir / str(entry["file_name"])).absolute())
        found[name] = entry
    return found


def _lines(name: str, rows: Rows) -> tuple[bytes, dict[str, None]]:
    """The rows as lines of JSON, and their columns."""
    lines, columns = list[str](), dict[str, None]()
    for index, row in enumerate(_plain(name, rows)):
        if not isinstance(row, Mapping):
            raise DataError(f"{name}: row {index}: expected a mapping of columns, got {shown(row)}")
        try:
            lines.append(json.dumps(dict(row), default=_number))
        except (TypeError, ValueError) as error:
            raise DataError(f"{name}: row {index}: {error}; use text, numbers and lists") from None
        columns.update(dict.fromkeys(map(str, row)))
    if not lines:
        raise DataError(f"{name}: has no rows")
    return ("\n".join(lines) + "\n").encode(), columns


def _plain(name: str, rows: Rows) -> Rows:
    """The rows themselves, whatever form ``datasets`` would give them."""
    datasets = sys.modules.get("datasets")  # nobody has one of its objects who has not imported it
    if datasets is None:
        return rows
    if isinstance(rows, datasets.DatasetDict | datasets.IterableDatasetDict):
        splits = ", ".join(rows)
        raise DataError(f"{name}: expected one split, got all of them; take one of: {splits}")
    return rows.with_format(None) if isinstance(rows, datasets.Dataset) else rows


def _number(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a value is of type {type(value).__name__}")


def _entry(name: str, columns: Mapping[str, None]) -> Mapping[str, object]:
    for known, entry in KNOWN.items():
        if set(known) <= columns.keys():
            return entry
    forms = "; ".join(", ".join(known) for known in KNOWN)
    raise DataError(
        f"{name}: its columns are {', '.join(columns)}; expected one of these forms: {forms}. "
        "Rename the columns, or write a file and describe it in a dataset_info.json"
    )
