"""One value of a row: of the right type, or a DataError that names the column.

A column is absent if its name is None (switched off), the row lacks it, or its value is null:
columnar files contain nulls where a row has no value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches

from ....errors import DataError
from ...example import JSON

Row = Mapping[str, object]
TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
TEMPLATE_ARGUMENTS = "chat_template_kwargs"  # TRL's column, of rows of every format


class NothingToLearnError(DataError):
    """A row that is not broken, but has a null where its value belongs, or says itself that it is
    not to be trained on. Such rows are dropped and counted, however many there are."""


def text(row: Row, column: str | None) -> str | None:
    """The text of a column, None if it is absent."""
    value = _value(row, column)
    return None if value is None else as_text(value, f"column {column!r}")


def as_text(value: object, where: str) -> str:
    """``value`` if it is text that a tokenizer can encode."""
    if not isinstance(value, str):
        cure = f'; write it as text: "{value}"' if isinstance(value, int | float) else ""
        raise DataError(f"{where}: expected text, got {shown(value)}{cure}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            at = f"at character {error.start}"
            raise DataError(
                f"{where}: half of a surrogate pair {at}, which is not valid text"
            ) from None
    return value


def structure(row: Row, column: str | None) -> object:
    """The list or object of a column, or of the JSON string in it; None if it is absent."""
    value = _value(row, column)
    if not isinstance(value, str):
        return value
    return from_json(value, f"column {column!r}") if value.strip() else None


def from_json(value: str, where: str) -> object:
    """Parse a JSON string."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error}): {shown(value)}") from None


def tools(row: Row, column: str | None) -> tuple[JSON, ...]:
    """Schemas of functions, without OpenAI's wrapping ``{"type", "function": ...}``."""
    value = structure(row, column)
    if value is None:
        return ()
    where = f"column {column!r}"
    if not isinstance(value, list):
        raise DataError(f"{where}: expected a list of function schemas, got {shown(value)}")
    return tuple(_function(item, where) for item in value)


def _function(value: object, where: str) -> JSON:
    value = from_json(value, where) if isinstance(value, str) else value
    schema = value.get("function", value) if isinstance(value, Mapping) else value
    if not isinstance(schema, Mapping) or not isinstance(schema.get("name"), str):
        raise DataError(f"{where}: expected a function schema with a name, got {shown(value)}")
    return schema


def label(row: Row, column: str | None) -> bool | None:
    """Whether the response is desirable; None if no such column is named."""
    if column is None:
        return None
    value = _value(row, column)
    if value is None:
        raise missing(row, column)
    if (found := truth(value)) is None:
        raise DataError(f"column {column!r}: expected true or false, got {shown(value)}")
    return found


def truth(value: object) -> bool | None:
    """What ``true``, 1, or either of them as text means, as csv has it; None of anything else."""
    if not isinstance(value, bool | int | float | str):
        return None
    return TRUTH.get(str(value).strip().lower().removesuffix(".0"))


def template_arguments(row: Row) -> JSON:
    """What a row gives the chat template beside its messages, such as ``enable_thinking``."""
    value = structure(row, TEMPLATE_ARGUMENTS)
    if value is not None and not isinstance(value, Mapping):
        raise DataError(f"column {TEMPLATE_ARGUMENTS!r}: expected an object, got {shown(value)}")
    return {name: each for name, each in (value or {}).items() if each is not None}


def missing(row: Row, column: str | None) -> DataError:
    """The error for a row without its main column, or with a null in it."""
    if column in row:
        return NothingToLearnError(f"no value in the column {column!r}")
    found = ", ".join(row) or "none"
    return DataError(f"no column {column!r} (columns found: {found}){nearest(str(column), row)}")


def nearest(word: str, choices: Mapping[str, object]) -> str:
    """`` (did you mean x?)`` for the choice most similar to ``word``, or nothing."""
    close = get_close_matches(word, list(choices), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def shown(value: object) -> str:
    """The type of a value, and as much of the value as fits into a message."""
    if value is None:
        return "null"
    words = repr(value)
    words = words if len(words) <= 60 else words[:57] + "..."
    return f"{type(value).__name__} {words}"


def _value(row: Row, column: str | None) -> object:
    return None if column is None else row.get(column)
