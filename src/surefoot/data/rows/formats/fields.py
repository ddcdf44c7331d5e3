"""One value of a row: of the right type, or a DataError that names the column.

A column is absent if its name is None (switched off), the row lacks it, or its value is null:
columnar files contain nulls where a row has no value.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from ....errors import DataError, did_you_mean
from ...example import JSON

Row = Mapping[str, object]
TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
MARKS = ("kto_tag", "label")  # usual names of a column with true for good responses
EMPTY: tuple[object, ...] = (None, "", [], {})
TEMPLATE_ARGUMENTS = "chat_template_kwargs"  # TRL's column, of rows of every format
Parameters = Mapping[str, tuple[Collection[str], Collection[str]]]  # function -> all, required
MEANT = ("default", "const", "example", "examples")  # keys of a schema that may have a null
OMITTED = (
    "nulls in arguments of calls, or as defaults of schemas, omitted, as a columnar file adds "
    "them; if they are meant, store calls and schemas as JSON text"
)
KEPT = (
    "nulls in arguments of calls of functions without a schema, kept; if the file was exported "
    "from a columnar one, which adds them, remove them"
)


class NothingToLearnError(DataError):
    """A row that is not broken, but has a null where its value belongs, or says itself that it is
    not to be trained on. Such rows are dropped and counted, however many there are."""


class MarkedRow(dict[str, object]):
    """A row that is being read. Who reads the objects in it marks the keys that it passes over."""

    def __init__(self, row: Row) -> None:
        super().__init__(row)
        self.unread: dict[str, None] = {}  # such as "detail of a part"


def mark_unread(row: Row, value: JSON, read: Collection[str], of: str) -> None:
    """Mark the keys of ``value``, an object in ``row``, that are not in ``read`` and say
    something."""
    if isinstance(row, MarkedRow) and not value.keys() <= set(read):
        others = (key for key in value if key not in read and value[key] not in EMPTY)
        row.unread |= {f"{key} of {of}": None for key in others}


def text(row: Row, column: str | None) -> str | None:
    """The text of a column, None if it is absent."""
    value = _value(row, column)
    if value is None or (isinstance(value, str) and value.isascii()):  # as nearly always
        return value
    return as_text(value, f"column {column!r}")


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


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of JSON, of which Python would keep the last of two values. Raises
    ``ValueError``."""
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twin!r} occurs twice in an object; keep one")
    return members


# Made once: ``json.loads`` with a hook makes one each time.
DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)


def from_json(value: str, where: str) -> object:
    """Parse a JSON string."""
    try:
        return DECODER.decode(value)
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
    return tuple(_function(item, where, row) for item in value)


def _function(value: object, where: str, row: Row) -> JSON:
    value = from_json(value, where) if isinstance(value, str) else value
    if isinstance(value, Mapping) and "function" in value:
        is_usual = value.get("type") == "function"
        mark_unread(row, value, ("function", "type") if is_usual else ("function",), "a tool")
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
    if (is_desirable := truth(value)) is None:
        raise DataError(f"column {column!r}: expected true or false, got {shown(value)}")
    return is_desirable


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
    columns, hint = ", ".join(row) or "none", did_you_mean(str(column), row)
    return DataError(f"no column {column!r} (columns found: {columns}){hint}")


def shown(value: object) -> str:
    """The type of a value, and as much of the value as fits into a message."""
    if value is None:
        return "null"
    words = repr(value)
    words = words if len(words) <= 60 else words[:57] + "..."
    return f"{type(value).__name__} {words}"


def _value(row: Row, column: str | None) -> object:
    return None if column is None else row.get(column)


# In a column of structures every row gets the keys of all other rows, with null where it has none:
# ``{"city": "Rome", "x": null}``. A reader of such a file marks these objects (``Struct``). A JSON
# file that was exported from one has the same nulls, which are recognized where nobody writes any:
# under ``properties`` of a schema, and for arguments that a function does not have.


class Struct(dict[str, object]):
    """An object of a columnar file, in which a null may stand for a key that it does not have."""


def without_added_nulls(
    row: Row, tools: str | None, turns: Collection[str | None]
) -> tuple[MarkedRow, list[str]]:
    """The row with its columns of ``tools`` and of ``turns`` as they were before a columnar file,
    and what to say of it."""
    restored, listed = MarkedRow(row), row.get(tools) if tools else None
    columns = {name: row[name] for name in turns if name and isinstance(row.get(name), list | dict)}
    if not columns and not isinstance(listed, list):
        return restored, []  # as every row of plain texts
    parameters, notes = _parameters(row, tools), list[str]()
    for is_exported in (False, True):
        values = _Values(parameters, is_exported=is_exported)
        if tools and isinstance(listed, list):
            restored[tools] = values.schema(listed)
        restored |= {name: values.turns(value) for name, value in columns.items()}
        notes = list(values.notes)
        if not values.has_odd_null:
            break
    return restored, notes


class _Values:
    """Values without added nulls, and what was seen of nulls."""

    def __init__(self, parameters: Parameters, *, is_exported: bool) -> None:
        """``is_exported``: every object may have added nulls, not only those that are marked."""
        self._parameters, self._is_exported = parameters, is_exported
        self.notes: dict[str, None] = {}
        self.has_odd_null = False  # one where nobody writes any

    def schema(self, value: object, key: str = "", *, is_inside: bool = False) -> object:
        """Schemas, or a part of one, which ``key`` names."""
        if isinstance(value, list):
            return [self.schema(each, key, is_inside=is_inside) for each in value]
        if not isinstance(value, Mapping):
            return value
        is_added, restored = self._is_exported or isinstance(value, Struct), dict[str, object]()
        for name, each in value.items():
            is_free = name in MEANT and key != "properties"
            if each is None and not is_free:
                self.has_odd_null |= is_inside
            elif each is None and is_added:
                self.notes[OMITTED] = None
            else:
                is_in_it = is_inside or name == "parameters"
                restored[name] = self.schema(each, name, is_inside=is_in_it)
        return restored

    def turns(self, value: object) -> object:
        """Turns, or a part of one."""
        if isinstance(value, list):
            return [self.turns(each) for each in value]
        if not isinstance(value, Mapping):
            return value
        is_added = self._is_exported or isinstance(value, Struct)
        restored = {
            name: self.turns(each)
            for name, each in value.items()
            if each is not None or not is_added
        }
        name, arguments = value.get("name"), value.get("arguments")
        if isinstance(name, str) and isinstance(arguments, Mapping):
            is_added = self._is_exported or isinstance(arguments, Struct)
            restored["arguments"] = {
                key: self.turns(each)
                for key, each in arguments.items()
                if each is not None or self._is_meant(name, key, is_added=is_added)
            }
        return restored

    def _is_meant(self, function: str, argument: str, *, is_added: bool) -> bool:
        """Whether a call has an argument that is null."""
        parameters = self._parameters.get(function)
        if parameters is not None:
            names, required = parameters
            self.has_odd_null |= argument not in names
            if argument not in names or argument in required:
                return argument in required
        if is_added or parameters is None:
            self.notes[OMITTED if is_added else KEPT] = None
        return not is_added


def _parameters(row: Row, tools: str | None) -> Parameters:
    """The parameters of each function of a row."""
    by_function: dict[str, tuple[Collection[str], Collection[str]]] = {}
    try:
        listed = structure(row, tools)
    except DataError:  # which its format says
        return by_function
    for each in listed if isinstance(listed, list) else []:
        try:
            schema = _mapping(json.loads(each) if isinstance(each, str) else each)
        except ValueError:
            continue
        schema = _mapping(schema.get("function", schema))
        name, parameters = schema.get("name"), _mapping(schema.get("parameters"))
        properties, required = parameters.get("properties"), parameters.get("required")
        if isinstance(properties, Mapping) and isinstance(name, str):
            names = {key for key, each in properties.items() if each is not None}
            by_function[name] = names, required if isinstance(required, list) else []
    return by_function


def _mapping(value: object) -> JSON:
    return value if isinstance(value, Mapping) else {}
