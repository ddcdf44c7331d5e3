"""From a dataset's entry to its examples; every row that gives none is counted."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from itertools import islice

from ...errors import DataError, counted
from ..data_order import Index
from ..example import BrokenRow, Example, Message
from ..section import DataSection
from ._row_sources import first_broken
from .formats import FORMATS, Format
from .formats._turns import EMPTY, LEARNING, trains
from .formats.fields import (
    MARKS,
    TEMPLATE_ARGUMENTS,
    NothingToLearnError,
    Row,
    nearest,
    shown,
    structure,
    template_arguments,
    without_added_nulls,
)
from .registry import MEDIA, PROMPTS, RANKING_COLUMNS, RESPONSES, DatasetEntry

USUAL = (*("messages", "conversations"), *PROMPTS, *RESPONSES, "chosen", "rejected", "text")
TURNS = ("messages", "prompt", "completion", "chosen", "rejected")  # columns with turns
SINGLE = ("response", "completion", "reasoning")  # not read of a row with two responses
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


def read_examples(
    entry: DatasetEntry,
    *,
    max_samples: int | None = None,
    max_broken_rows: int = 0,
    chosen: Index | None = None,
) -> Iterator[Example | BrokenRow]:
    """One item per row, in order, or per ``chosen`` row (ascending). Raises DataError if there are
    no rows, if a column that the entry lists is in none of them, and at the first broken row above
    ``max_broken_rows``."""
    first_values: dict[str, object] = {}  # all columns so far in order, each with its first value
    broken: list[BrokenRow] = []
    read = read_columns(entry)
    rows = iter(entry.source.rows())
    numbered: Iterator[tuple[int, Row | BrokenRow]] = enumerate(rows)
    if chosen is not None:
        numbers = set(chosen.tolist())
        numbered = (pair for pair in islice(numbered, max(numbers) + 1) if pair[0] in numbers)
    for index, row in islice(numbered, max_samples):
        if not isinstance(row, BrokenRow):
            first_values |= {n: v for n, v in row.items() if first_values.get(n) is None}
            check_columns(entry, index, row)
        item = _read(entry, index, row, read)
        if isinstance(item, BrokenRow) and not item.is_dropped:
            broken.append(item)
        if len(broken) > max_broken_rows:
            _check_columns(entry, first_values, rows)
            raise too_many_broken(entry.name, broken, max_broken_rows)
        yield item
    if not first_values and not broken:
        raise DataError(f"dataset {entry.name!r}: {entry.source} has no rows")
    _check_columns(entry, first_values, rows)


def read_rows(
    entry: DatasetEntry, section: DataSection, chosen: Index | None = None
) -> Iterator[Example | BrokenRow]:
    """The same within the limits of a section; ``chosen`` rows are not counted by them."""
    most = entry.limit(section.max_samples) if chosen is None else None
    broken = section.max_broken_rows
    return read_examples(entry, max_samples=most, max_broken_rows=broken, chosen=chosen)


def _read(
    entry: DatasetEntry, index: int, row: Row | BrokenRow, read: Collection[str]
) -> Example | BrokenRow:
    if isinstance(row, BrokenRow):
        return row
    try:
        unread = meaningful_columns(row, read)
        origin, mark = f"{entry.name}:{index}", unread_mark(entry, row)
        example = parse_row(entry.format, row, origin, mark, unread)
        example, flags = flagged(example, entry, row, read)
        if not flags:
            return example
        return replace(example, unread=tuple(name for name in unread if name not in flags))
    except DataError as error:
        return BrokenRow(index, str(error), isinstance(error, NothingToLearnError))


def parse_row(
    form: Format,
    row: Row,
    origin: str = "",
    unread_mark: str | None = None,
    unread: tuple[str, ...] = (),
) -> Example:
    """A row as its format reads it, without the nulls of a columnar file, and with what it gives
    the chat template. Raises ``DataError``."""
    # NaN is what pandas writes for a value that is missing.
    row = {name: None if value != value else value for name, value in row.items()}  # noqa: PLR0124
    turns = [getattr(form, name, None) for name in TURNS]
    plain, notes = without_added_nulls(row, form.tools, turns)
    example, arguments = form.read(plain), template_arguments(row)
    return replace(  # once: it takes 8 µs
        example,
        columns=row,
        notes=tuple(notes),
        template_arguments=arguments,
        origin=origin,
        unread_mark=unread_mark,
        unread=unread,
    )


def form_of(row: Row, forms: Sequence[tuple[Format, tuple[str, ...]]]) -> Format | None:
    """The one of ``forms``, each with its columns, that reads this row: the one with most of its
    columns here, as far as a row without a response has them. None if no main column is here."""
    fitting = [each for each in forms if getattr(each[0], each[0].main) in row]
    if not fitting:
        return None
    form, _ = max(fitting, key=lambda each: sum(name in row for name in each[1]))
    is_pair = form.ranking and row.get(form.chosen or "") and row.get(form.rejected or "")
    is_labelled = form.kto_tag if form.kto_tag in row else None
    return replace(form, ranking=bool(is_pair), kto_tag=is_labelled)


def _check_columns(
    entry: DatasetEntry, first_values: dict[str, object], rest: Iterator[Row | BrokenRow]
) -> None:
    """Every column that the entry names must be in some row, even in one that is not used."""
    absent = set(entry.columns) - first_values.keys()
    while absent and (row := next(rest, None)) is not None:
        first_values = {**({} if isinstance(row, BrokenRow) else row), **first_values}
        absent -= first_values.keys()
    for column in entry.columns:
        if column in absent and first_values:
            columns = ", ".join(first_values)
            what = f"no row has the column {column!r}"
            if not entry.named and not any(name in first_values for name in USUAL):
                what = f"no column has a usual name, such as {', '.join(map(repr, USUAL[:6]))}"
            raise DataError(
                f"dataset {entry.name!r}: {what}{_advice(entry, column, first_values)}; "
                f"the columns of {entry.source} are: {columns}"
            )


def _advice(entry: DatasetEntry, column: str, first_values: Mapping[str, object]) -> str:
    """A suggestion for the entry, derived from the columns of the dataset."""
    if hint := nearest(column, first_values):
        return hint
    for name, kind in FORMATS.items():
        main = getattr(kind(), kind.main)
        if main in first_values and not isinstance(entry.format, kind):
            return f' (add "formatting": "{name}" to the entry?)'
    if "text" in first_values:
        return ' (add "columns": {"prompt": "text"} to the entry?)'
    if not entry.named:
        near = ((name, get_close_matches(name, USUAL, n=1, cutoff=0.8)) for name in first_values)
        if misspelled := next(((name, close[0]) for name, close in near if close), None):
            return f" (did you mean {misspelled[1]} by {misspelled[0]}?)"
    texts = [name for name, value in first_values.items() if isinstance(value, str)]
    suggested = dict(zip(("prompt", "response"), [*texts, *first_values], strict=False))
    columns = ", ".join(f"{key}: {_quoted(name)}" for key, name in suggested.items())
    line = f"datasets: [{{{entry.source.as_entry}, columns: {{{columns}}}}}]"
    is_csv = entry.source.as_entry.lower().endswith((".csv", ".tsv"))
    first = "; if the first line is a row, put one with names before it" if is_csv else ""
    return f" (say which is which: {line}{first})"


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_]\w*", name) else json.dumps(name, ensure_ascii=False)


def too_many_broken(name: str, broken: Sequence[BrokenRow], limit: int) -> DataError:
    """The error that shows the first broken rows."""
    lines = "".join(f"\n{line}" for line in first_broken(broken))
    return DataError(
        f"dataset {name!r}: more than data.max_broken_rows = {limit} rows cannot be read; fix "
        f"them or raise the limit. The first ones:{lines}"
    )


# Rows may have any other columns, such as ids; of these, a report names those that sound as if they
# meant something. But a row with an image is not its text alone, and a response that is marked
# wrong must not be imitated. Such a column stops the run until its entry says what it is; null says
# that it means nothing here.


def check_columns(entry: DatasetEntry, index: int, row: Row) -> None:
    """Raises ``DataError``: a row has videos, or functions, that its entry does not read."""
    for name in MEDIA:
        if row.get(name) and name not in entry.named:
            raise DataError(
                f"dataset {entry.name!r}: row {index} has {name}, and only text and pictures are "
                f'supported; leave such rows out, or add "columns": {{"{name}": null}} to the '
                'entry to train on the text without them, or {"images": "image"} for pictures'
            )
    for name in row.keys() - entry.columns:
        if name != name.strip() and name.strip() in USUAL:
            raise DataError(
                f"dataset {entry.name!r}: the column {name!r} is not read, for its blanks; rename "
                f"it to {name.strip()!r} in the first line of the file"
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
    meaningful = (name for name in others if WORDS.search(name) or LEARNING.search(name))
    return tuple(name for name in meaningful if row[name] not in EMPTY)


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
    decisions = [trains(name, flag) for flag in values]
    if len(decisions) == len(messages) - first and None not in decisions:
        pairs = zip(messages[first:], decisions, strict=True)
        return (*messages[:first], *(replace(message, learn=learn) for message, learn in pairs))
    if trains(name, True) is None and len(decisions) != len(messages) - first:
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
    format_columns = {getattr(form, name) for name in names - {"ranking", *unread}}
    mentioned = (*format_columns, *entry.named, TEMPLATE_ARGUMENTS)
    return {name for name in mentioned if isinstance(name, str)}


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
