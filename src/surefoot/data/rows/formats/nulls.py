"""Nulls that a columnar file has added to tools and calls.

In a column of structures every row gets the keys of all other rows, with null where it has none:
``{"city": "Rome", "x": null}``. A reader of such a file marks these objects (``Struct``). A JSON
file that was exported from one has the same nulls, which are recognized where nobody writes any:
under ``properties`` of a schema, and for arguments that a function does not have.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping

from ....errors import DataError
from .fields import Row, structure

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


class Struct(dict[str, object]):
    """An object of a columnar file, in which a null may stand for a key that it does not have."""


def without_added_nulls(
    row: Row, tools: str | None, turns: Collection[str | None]
) -> tuple[Row, list[str]]:
    """The row with its columns of ``tools`` and of ``turns`` as they were before a columnar file,
    and what to say of it."""
    made, notes = dict(row), dict[str, None]()
    listed = row.get(tools) if tools else None
    parameters = _parameters(row, tools)
    columns = {name: row[name] for name in turns if name and isinstance(row.get(name), list | dict)}
    is_exported = _has_odd_null(listed) or any(
        _has_odd_argument(value, parameters) for value in columns.values()
    )
    if tools and isinstance(listed, list):
        made[tools] = _schema(listed, is_exported, notes)
    for column, value in columns.items():
        made[column] = _turns(value, is_exported, parameters, notes)
    return made, list(notes)


def _has_odd_argument(value: object, parameters: Parameters) -> bool:
    """Whether a call has a null for an argument that its function does not have."""
    if isinstance(value, list):
        return any(_has_odd_argument(each, parameters) for each in value)
    if not isinstance(value, Mapping):
        return False
    known, arguments = parameters.get(str(value.get("name"))), value.get("arguments")
    if known is not None and isinstance(arguments, Mapping):
        return any(each is None and name not in known[0] for name, each in arguments.items())
    return any(_has_odd_argument(each, parameters) for each in value.values())


def _has_odd_null(value: object, key: str = "", *, is_schema: bool = False) -> bool:
    """Whether there is a null in a schema where nobody writes one."""
    if isinstance(value, list):
        return any(_has_odd_null(each, key, is_schema=is_schema) for each in value)
    if not isinstance(value, Mapping):
        return False
    return any(
        (each is None and is_schema and (key == "properties" or name not in MEANT))
        or _has_odd_null(each, name, is_schema=is_schema or name == "parameters")
        for name, each in value.items()
    )


def _schema(value: object, is_exported: bool, notes: dict[str, None], key: str = "") -> object:
    if isinstance(value, list):
        return [_schema(each, is_exported, notes, key) for each in value]
    if not isinstance(value, Mapping):
        return value
    is_added = is_exported or isinstance(value, Struct)
    made = {}
    for name, each in value.items():
        is_free = name in MEANT and key != "properties"
        if each is None and is_free and is_added:
            notes[OMITTED] = None
        if each is not None or (is_free and not is_added):
            made[name] = _schema(each, is_exported, notes, name)
    return made


def _turns(
    value: object, is_exported: bool, parameters: Parameters, notes: dict[str, None]
) -> object:
    """Turns, or a part of one, without added nulls."""
    if isinstance(value, list):
        return [_turns(each, is_exported, parameters, notes) for each in value]
    if not isinstance(value, Mapping):
        return value
    is_added = is_exported or isinstance(value, Struct)
    made = {
        name: _turns(each, is_exported, parameters, notes)
        for name, each in value.items()
        if each is not None or not is_added
    }
    name, arguments = value.get("name"), value.get("arguments")
    if isinstance(name, str) and isinstance(arguments, Mapping):
        known = parameters.get(name)
        is_added = is_exported or isinstance(arguments, Struct)
        made["arguments"] = {
            key: _turns(each, is_exported, parameters, notes)
            for key, each in arguments.items()
            if each is not None or _is_meant(key, known, is_added, notes)
        }
    return made


def _is_meant(
    argument: str,
    known: tuple[Collection[str], Collection[str]] | None,
    is_added: bool,
    notes: dict[str, None],
) -> bool:
    """Whether a call has an argument that is null."""
    if known is not None and (argument not in known[0] or argument in known[1]):
        return argument in known[1]
    if is_added or known is None:
        notes[OMITTED if is_added else KEPT] = None
    return not is_added


def _parameters(row: Row, tools: str | None) -> Parameters:
    """The parameters of each function of a row."""
    try:
        listed = structure(row, tools)
    except DataError:  # which its format says
        return {}
    return dict(_signatures(listed if isinstance(listed, list) else []))


def _signatures(listed: list[object]) -> Iterator[tuple[str, tuple[Collection[str], list[str]]]]:
    for each in listed:
        try:
            schema = json.loads(each) if isinstance(each, str) else each
        except ValueError:
            continue
        schema = schema.get("function", schema) if isinstance(schema, Mapping) else {}
        schema = schema if isinstance(schema, Mapping) else {}
        name, parameters = schema.get("name"), schema.get("parameters")
        parameters = parameters if isinstance(parameters, Mapping) else {}
        properties, required = parameters.get("properties"), parameters.get("required")
        if isinstance(properties, Mapping) and isinstance(name, str):
            names = {key for key, each in properties.items() if each is not None}
            yield name, (names, required if isinstance(required, list) else [])
