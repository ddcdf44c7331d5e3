"""Columns that change what a row means, in rows whose entry does not read them.

Rows may have any other columns, such as ids. But a row with an image is not its text alone, and a
response that is marked wrong must not be imitated. Such a column stops the run until its entry says
what it is; null says that it means nothing here.
"""

from __future__ import annotations

from ...errors import DataError
from .formats.fields import Row
from .registry import MEDIA, DatasetEntry

MARKS = ("kto_tag", "label")  # usual names of a column with true for good responses
TRUTH = ("true", "false")  # csv has only text


def check_columns(entry: DatasetEntry, index: int, row: Row) -> None:
    """Raises ``DataError``: a row has images, or functions, that its entry does not read."""
    for name in MEDIA:
        if row.get(name) and name not in entry.named:
            raise DataError(
                f"dataset {entry.name!r}: row {index} has {name}, and only text is supported; "
                f'leave such rows out, or add "columns": {{"{name}": null}} to the entry to train '
                "on the text without them"
            )
    if row.get("functions") and not {"functions", "tools"} & set(entry.named):
        raise DataError(
            f"dataset {entry.name!r}: row {index} has the column 'functions', which is not read; "
            'add "columns": {"tools": "functions"} to the entry, or {"tools": null} to train '
            "without them"
        )


def unread_mark(entry: DatasetEntry, row: Row) -> str | None:
    """The column that says whether a response is good, if there is one and nothing reads it."""
    if "kto_tag" in entry.named:
        return None
    for name in MARKS:
        if name not in entry.named and _is_mark(row.get(name)):
            return name
    return None


def _is_mark(value: object) -> bool:
    return isinstance(value, bool) or (isinstance(value, str) and value.lower() in TRUTH)
