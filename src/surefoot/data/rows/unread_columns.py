"""Columns that change what a row means, in rows whose entry does not read them.

Rows may have any other columns, such as ids; of these, a report names those that sound as if they
meant something. But a row with an image is not its text alone, and a
response that is marked wrong must not be imitated. Such a column stops the run until its entry says
what it is; null says that it means nothing here.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import fields, replace

from ...errors import DataError, counted
from ..example import Example, Message
from .formats.fields import TEMPLATE_ARGUMENTS, NothingToLearnError, Row, shown, structure
from .formats.turns import EMPTY, LEARNING, trains
from .registry import MEDIA, RANKING_COLUMNS, DatasetEntry

SINGLE = ("response", "completion", "reasoning")  # not read of a row with two responses
MARKS = ("kto_tag", "label")  # usual names of a column with true for good responses
TRUTH = ("true", "false")  # csv has only text
# Words in the name of a column that is about how to read, or to train on, its row.
WORDS = re.compile(
    r"(?<![a-z])(?:"
    r"labels?|scores?|ratings?|weights?|rewards?|margins?|quality|preferences?|preferred|correct|"
    r"texts?|systems?|contexts?|history|inputs?|prompts?|instructions?|questions?|"
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
    others = (name for name in row if name not in read)
    named = (name for name in others if WORDS.search(name) or LEARNING.search(name))
    return tuple(name for name in named if row[name] not in EMPTY)


def flagged(
    example: Example, entry: DatasetEntry, row: Row, read: Collection[str]
) -> tuple[Example, set[str]]:
    """The example with what its row's columns say of its turns (``"loss_mask": [0, 0, 0, 1]``), and
    the names of these columns. Raises ``DataError``: such a column has no obvious meaning, or says
    that the row is not to be trained on."""
    names = set[str]()
    for name in row:
        if name in read or row[name] in EMPTY or not LEARNING.search(name):
            continue
        value = row[name]
        is_list = isinstance(value, list) or str(value).lstrip().startswith("[")
        flags = structure(row, name) if is_list else [value]
        messages = _flagged(example, entry, name, flags) if is_list else example.messages
        if messages is None or (not is_list and not _is_flag(name, value)):
            continue  # named as a column that nothing reads
        if not is_list and trains(name, value) is None:
            raise DataError(
                f"column {name!r}: expected true or false, or a list with 0 or 1 for each turn, "
                f"got {shown(value)}; remove the column to train on every response"
            )
        if not is_list and trains(name, value) is False:
            raise NothingToLearnError(f"the column {name!r} says that it is not to be trained on")
        names.add(name)
        example = replace(example, messages=messages)
    return example, names


def _is_flag(name: str, value: object) -> bool:
    """Whether a value for a whole row is a flag. A number under ``weight`` or ``loss`` may be one
    that somebody has measured, and text may be anything."""
    if isinstance(value, bool) or trains(name, True) is None:
        return isinstance(value, bool) and trains(name, True) is not None
    is_measured = name.lower() in ("weight", "loss")
    return not is_measured and (isinstance(value, int | float) or trains(name, value) is not None)


def _flagged(
    example: Example, entry: DatasetEntry, name: str, flags: object
) -> tuple[Message, ...] | None:
    """The messages, each with its flag of a list; a system message of a column has none. None if
    the list is of something else than turns."""
    messages, form = example.messages, entry.format
    values = flags if isinstance(flags, list) else []
    has_system = isinstance(form.system, str) and bool(example.columns.get(form.system))
    first = 1 if has_system and len(values) == len(messages) - 1 else 0
    said = [trains(name, flag) for flag in values]
    if len(said) == len(messages) - first and None not in said:
        pairs = zip(messages[first:], said, strict=True)
        return (*messages[:first], *(replace(message, learn=learn) for message, learn in pairs))
    if trains(name, True) is None and len(said) != len(messages) - first:
        return None
    raise DataError(
        f"column {name!r}: expected a list with 0 or 1 for each of "
        f"{counted(len(messages) - has_system, 'turn')}, got {shown(flags)}; remove the column to "
        "train on every response"
    )


def read_columns(entry: DatasetEntry) -> set[str]:
    """The columns that the format of an entry reads, and those that the entry mentions."""
    form, names = entry.format, {field.name for field in fields(entry.format)}
    unread = SINGLE if form.ranking else RANKING_COLUMNS
    own = {getattr(form, name) for name in names - {"ranking", *unread}}
    given = (*own, *entry.named, TEMPLATE_ARGUMENTS)
    return {name for name in given if isinstance(name, str)}


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
