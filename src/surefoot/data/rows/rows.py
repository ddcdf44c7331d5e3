"""From a dataset's entry to its examples; every row that gives none is counted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import islice
from math import isnan

from ...errors import DataError, counted, did_you_mean, first_line, similar
from ..data_order import Index
from ..example import BrokenRow, Example, Message, sources_of
from ..section import DataSection
from ._row_sources import first_broken
from .formats import FORMATS, Format
from .formats._picture_sources import PICTURE
from .formats._turns import LEARNING, trains
from .formats.fields import (
    EMPTY,
    MARKS,
    TEMPLATE_ARGUMENTS,
    NothingToLearnError,
    Row,
    from_json,
    shown,
    template_arguments,
    without_added_nulls,
)
from .registry import (
    FORMS,
    MEDIA,
    OBJECTS,
    PROMPTS,
    RANKING_COLUMNS,
    RESPONSES,
    TAGS,
    DatasetEntry,
    columns_of,
)

USUAL = (*("messages", "conversations"), *PROMPTS, *RESPONSES, "chosen", "rejected", "text")
TURNS = ("messages", "prompt", "completion", "chosen", "rejected")  # columns with turns
SINGLE = ("response", "completion", "reasoning")  # not read of a row with two responses
TRUTH = ("true", "false")  # csv has only text
# What a text points to by a mark, in LLaMA-Factory's and ms-swift's rows: the column of each mark.
POINTERS = re.compile(r"<(image|video|audio|bbox|ref-object)(?:[ _-]?\d+)?>")
POINTED = {"image": "images", "video": "videos", "audio": "audios"}  # others to ``objects``

_BOXES = re.compile(r"""["'](?:b?box(?:es)?|points?)(?:_2d)?["']\s*:\s*\[|<\|?box(?:_start\|)?>""")
BOXES_OF_FILES = (
    "boxes beside a picture that the model sees in another size than its file has; if they are in "
    "pixels, write them in those of that size (data.media.max_pixels, the limits of the processor)"
)


@dataclass(frozen=True)
class Reading:
    """What reads a row beside its format: a stage, and the chat template that it uses."""

    template_reads: Callable[[str, str], bool]  # a key of a turn of a role, or another object's
    columns: frozenset[str] = frozenset()  # that the stage reads beside the conversation
    pairs: bool = True  # of chosen and rejected; else what stands beside them is read
    sees: bool | None = None  # whether marks stand for pictures; None: they may be text
    # whether the model sees one of these pictures in another size than its file has
    resizes: Callable[[Sequence[str | bytes]], bool] = lambda _: False


ANY = Reading(lambda *_: True)  # before it is known what is trained, and how


def read_examples(
    entry: DatasetEntry,
    *,
    max_samples: int | None = None,
    max_broken_rows: int = 0,
    chosen: Index | None = None,
    reading: Reading = ANY,
) -> Iterator[Example | BrokenRow]:
    """One item per row, in order, or per ``chosen`` row (ascending). Raises DataError if there are
    no rows, if a column that the entry lists is in none of them, and at the first broken row above
    ``max_broken_rows``."""
    first_values: dict[str, object] = {}  # all columns so far in order, each with its first value
    broken: list[BrokenRow] = []
    if entry.alone is not None and not reading.pairs:
        entry = replace(entry, format=entry.alone, columns=columns_of({}, entry.alone))
    read = read_columns(entry) | reading.columns
    unread_of = cache(lambda columns: [name for name in columns if name not in read])  # few sets
    rows = iter(entry.source.rows())
    numbered: Iterator[tuple[int, Row | BrokenRow]] = enumerate(rows)
    if chosen is not None:
        numbers = set(chosen.tolist())
        numbered = (pair for pair in islice(numbered, max(numbers) + 1) if pair[0] in numbers)
    for index, row in islice(numbered, max_samples):
        if not isinstance(row, BrokenRow):
            first_values |= {n: v for n, v in row.items() if first_values.get(n) is None}
            names = unread_of(tuple(row))
            check_columns(entry, index, row, names)
        item = row if isinstance(row, BrokenRow) else _read(entry, index, row, names, reading)
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
    entry: DatasetEntry, section: DataSection, chosen: Index | None = None, reading: Reading = ANY
) -> Iterator[Example | BrokenRow]:
    """The same within the limits of a section; ``chosen`` rows are not counted by them."""
    most = entry.limit(section.max_samples) if chosen is None else None
    broken = section.max_broken_rows
    return read_examples(
        entry, max_samples=most, max_broken_rows=broken, chosen=chosen, reading=reading
    )


def _read(
    entry: DatasetEntry, index: int, row: Row, names: Sequence[str], reading: Reading
) -> Example | BrokenRow:
    try:
        unread = [name for name in names if row[name] not in EMPTY]
        origin, mark = f"{entry.name}:{index}", unread_mark(entry, row)
        example, flags = flagged(parse_row(entry.format, row, origin, mark), entry, row, unread)
        columns = [name for name in unread if name not in flags]
        keys = (*columns, *_inside(example, entry.format, reading, entry.named, columns))
        notes = (*example.notes, *_notes_of_boxes(example, reading))
        if keys == example.unread and notes == example.notes:
            return example
        return replace(example, unread=keys, notes=notes)
    except DataError as error:
        return BrokenRow(index, str(error), isinstance(error, NothingToLearnError))
    except Exception as error:  # of a format's code, which meets values that nobody has foreseen
        return BrokenRow(index, f"cannot be read ({type(error).__name__}: {first_line(error)})")


def parse_row(form: Format, row: Row, origin: str = "", mark: str | None = None) -> Example:
    """A row as its format reads it, without the nulls of a columnar file, and with what it gives
    the chat template; ``mark`` is its ``unread_mark``. Raises ``DataError``."""
    # NaN is what pandas writes for a value that is missing.
    if any(isinstance(value, float) and isnan(value) for value in row.values()):
        row = {n: None if isinstance(v, float) and isnan(v) else v for n, v in row.items()}
    turns = [getattr(form, name, None) for name in TURNS]
    plain, notes = without_added_nulls(row, form.tools, turns)
    example, arguments = form.read(plain), template_arguments(row)
    return replace(
        example,
        columns=row,
        notes=tuple(notes),
        template_arguments=arguments,
        unread=tuple(plain.unread),
        origin=origin,
        unread_mark=mark,
    )


def unread_keys(example: Example, form: Format, reading: Reading) -> tuple[str, ...]:
    """What nothing reads of a row of no dataset, as ``Example.unread``. Raises ``DataError``."""
    read = _format_columns(form) | {TEMPLATE_ARGUMENTS}
    columns = [n for n, value in example.columns.items() if n not in read and value not in EMPTY]
    return (*columns, *_inside(example, form, reading, (), columns))


def _inside(
    example: Example,
    form: Format,
    reading: Reading,
    named: Collection[str],
    columns: Sequence[str],
) -> tuple[str, ...]:
    """What nothing reads inside the columns of a row: keys of objects that its format does not
    read, and its template does not either, and marks in its texts. Raises ``DataError``: such a
    mark stands for a picture of which the model would be trained without it."""
    marks = {} if reading.sees is None else _unread_marks(example, form, named)
    for mark, column in marks.items() if reading.sees else ():
        # ``<video>`` alone is HTML
        if column in ("images", OBJECTS) or any(column[:-1] in name.lower() for name in columns):
            raise DataError(_no_picture(mark, column, columns))
    unread = dict.fromkeys(example.unread)
    for message in (*example.messages, example.chosen, example.rejected):
        if message is None or not (message.fields or message.tool_calls):
            continue
        keys = [(key, str(message.role), "turn") for key in message.fields]
        calls = [key for call in message.tool_calls for key in call]
        keys += [(key, "call", "call") for key in calls if key not in ("name", "arguments")]
        unread |= {
            f"{k} of a {of}": None for k, by, of in keys if not reading.template_reads(k, by)
        }
    for key in example.template_arguments:
        if not reading.template_reads(key, "arguments"):
            unread[f"{key} of {TEMPLATE_ARGUMENTS}"] = None
    return (*unread, *(f"{mark} in a text" for mark in marks))


def _notes_of_boxes(example: Example, reading: Reading) -> Iterator[str]:
    """That the boxes in a row's texts may be pixels of another picture than the model sees. What
    they mean, no row says, so they are named and not changed."""
    messages = [m for m in (*example.messages, example.chosen, example.rejected) if m is not None]
    sources = sources_of(messages)
    has_boxes = sources and any(_BOXES.search(message.content) for message in messages)
    if has_boxes and reading.resizes(sources):
        yield BOXES_OF_FILES


def _unread_marks(example: Example, form: Format, named: Collection[str]) -> dict[str, str]:
    """The marks in the texts of a row that stand for nothing, and the column that each points to,
    unless its entry says by null for the column that they are text."""
    marks = dict[str, str]()
    off = {*named} - {"images"} if getattr(form, "images", None) else {*named, "images"}
    for message in (*example.messages, example.chosen, example.rejected):
        if message is None or "<" not in message.content:
            continue
        for match in POINTERS.finditer(message.content):
            column = POINTED.get(match[1], OBJECTS)
            is_numbered = column == "images" and bool(message.media) and match[0] != PICTURE
            is_tag = f"</{match[1]}>" in message.content  # around what it is about
            if not (column in off or is_numbered or is_tag):
                marks[match[0]] = column
    return marks


def _no_picture(mark: str, name: str, columns: Sequence[str]) -> str:
    """The error for a text that points to a picture, say, which its row does not have."""
    near = f" (other columns: {', '.join(columns)})" if columns else ""
    pictures = '"columns": {"images": "photo"}, if they are in a column photo, or '
    return (
        f"the mark {mark} in a text, and nothing in its row that it stands for{near}; add to the "
        f'entry {pictures if name == "images" else ""}"columns": {{"{name}": null}}, if it is text'
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
    if hint := did_you_mean(column, first_values):
        return hint
    for name, kind in FORMATS.items():
        main = getattr(kind(), kind.main)
        if main in first_values and not isinstance(entry.format, kind):
            return f' (add "formatting": "{name}" to the entry?)'
    if "text" in first_values:
        return ' (add "columns": {"prompt": "text"} to the entry?)'
    if not entry.named:
        others = (name for name in first_values if name not in USUAL)
        near = ((name, similar(name, USUAL, cutoff=0.8)) for name in others)
        if misspelled := next(((name, close[0]) for name, close in near if close), None):
            return f" (did you mean {misspelled[1]} by {misspelled[0]}?)"
    texts = [name for name, value in first_values.items() if not isinstance(value, list | dict)]
    if not texts:
        return f" (write rows of one of these forms: {'; '.join(FORMS)})"
    suggested = dict(zip(("prompt", "response"), texts, strict=False))
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


def check_columns(entry: DatasetEntry, index: int, row: Row, unread: Sequence[str]) -> None:
    """Raises ``DataError``: a row has videos, functions or boxes among the columns that nothing
    reads, which the entry does not switch off."""
    for name in unread:
        if name == OBJECTS and _has_boxes(row[name]):
            raise DataError(
                f"dataset {entry.name!r}: row {index} has {name}, the boxes and names that <bbox> "
                "and <ref-object> stand for, which are not read; write them into the texts, as the "
                f'model takes them, or add "columns": {{"{name}": null}} to the entry to train '
                "without them"
            )
        if name in MEDIA and row[name] and not (name == "image" and "images" in entry.named):
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
    if "functions" in unread and row["functions"] and "tools" not in entry.named:
        raise DataError(
            f"dataset {entry.name!r}: row {index} has the column 'functions', which is not read; "
            'add "columns": {"tools": "functions"} to the entry, or {"tools": null} to train '
            "without them"
        )


def _has_boxes(value: object) -> bool:
    """Whether a value of ``objects`` is ms-swift's, or the JSON text of one; may be anything."""
    if isinstance(value, str):
        return value.lstrip().startswith("{") and '"bbox"' in value
    return isinstance(value, Mapping) and bool({"bbox", "ref"} & value.keys())


def flagged(
    example: Example, entry: DatasetEntry, row: Row, unread: Collection[str]
) -> tuple[Example, set[str]]:
    """The example with what its row's ``unread`` columns say of its turns (``"loss_mask": [0, 0,
    1]``), and the names of these columns. Raises ``DataError``: such a column has no obvious
    meaning, or says that the row is not to be trained on."""
    names = set[str]()
    for name in unread:
        if not LEARNING.search(name):
            continue
        value = row[name]
        flags = _list_of(value)
        is_list = flags is not None
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


def _list_of(value: object) -> list[object] | None:
    """A list, or that of a JSON text; None if it is neither."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = from_json(value, "")
        except DataError:
            return None
    return value if isinstance(value, list) else None


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
    return {*_format_columns(entry.format), *entry.named, TEMPLATE_ARGUMENTS}


def _format_columns(form: Format) -> set[str]:
    unread = SINGLE if form.ranking else RANKING_COLUMNS
    names = {field.name for field in fields(form)} - {"ranking", *unread, *TAGS}
    return {name for name in (getattr(form, each) for each in names) if isinstance(name, str)}


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
