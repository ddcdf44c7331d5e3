"""Columns that change what a row means, in rows whose entry does not read them.

Rows may have any other columns, such as ids; of these, a report names those that sound as if they
meant something. But a row with an image is not its text alone, and a
response that is marked wrong must not be imitated. Such a column stops the run until its entry says
what it is; null says that it means nothing here.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import fields

from ...errors import DataError
from .formats.fields import Row
from .registry import MEDIA, RANKING_COLUMNS, DatasetEntry

SINGLE = ("response", "completion", "reasoning")  # not read of a row with two responses
EMPTY: tuple[object, ...] = (None, "", [], {})
MARKS = ("kto_tag", "label")  # usual names of a column with true for good responses
TRUTH = ("true", "false")  # csv has only text
# Words in the name of a column that is about how to read, or to train on, its row.
WORDS = re.compile(
    r"(?<![a-z])(?:"
    r"labels?|scores?|ratings?|weights?|rewards?|margins?|quality|preferences?|preferred|correct|"
    r"systems?|contexts?|history|inputs?|prompts?|instructions?|questions?|"
    r"responses?|answers?|outputs?|completions?|chosen|rejected|messages|conversations|"
    r"thinking|thoughts?|reasoning|rationales?|tools?|functions?|images?|videos?|audios?"
    r")(?![a-z])",
    re.IGNORECASE,
)


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


def meaningful_columns(row: Row, read: Collection[str]) -> tuple[str, ...]:
    """The columns of a row that have a value, are not in ``read``, and have a name that means
    something."""
    others = (name for name in row if name not in read and WORDS.search(name))
    return tuple(name for name in others if row[name] not in EMPTY)


def read_columns(entry: DatasetEntry) -> set[str]:
    """The columns that the format of an entry reads, and those that the entry mentions."""
    form, names = entry.format, {field.name for field in fields(entry.format)}
    unread = SINGLE if form.ranking else RANKING_COLUMNS
    own = {getattr(form, name) for name in names - {"ranking", *unread}}
    return {name for name in (*own, *entry.named) if isinstance(name, str)}


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
