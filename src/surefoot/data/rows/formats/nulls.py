"""Nulls that a columnar file has added to tools and calls.

In a column of structures every row gets the keys of all other rows, with null where it has none:
``{"city": "Rome", "x": null}``. A reader of such a file marks these objects (``Struct``). A JSON
file that was exported from one has the same nulls, which are recognized where nobody writes any:
under ``properties`` of a schema, and for arguments that a function does not have.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from ....errors import DataError
from ...example import JSON
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
    made, listed = dict(row), row.get(tools) if tools else None
    columns = {name: row[name] for name in turns if name and isinstance(row.get(name), list | dict)}
    parameters, notes = _parameters(row, tools), list[str]()
    for is_exported in (False, True):
        found = _Values(parameters, is_exported=is_exported)
        if tools and isinstance(listed, list):
            made[tools] = found.schema(listed)
        made |= {name: found.turns(value) for name, value in columns.items()}
        notes = list(found.notes)
        if not found.has_odd_null:
            break
    return made, notes


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
        is_added, made = self._is_exported or isinstance(value, Struct), dict[str, object]()
        for name, each in value.items():
            is_free = name in MEANT and key != "properties"
            if each is None and not is_free:
                self.has_odd_null |= is_inside
            elif each is None and is_added:
                self.notes[OMITTED] = None
            else:
                is_in_it = is_inside or name == "parameters"
                made[name] = self.schema(each, name, is_inside=is_in_it)
        return made

    def turns(self, value: object) -> object:
        """Turns, or a part of one."""
        if isinstance(value, list):
            return [self.turns(each) for each in value]
        if not isinstance(value, Mapping):
            return value
        is_added = self._is_exported or isinstance(value, Struct)
        made = {
            name: self.turns(each)
            for name, each in value.items()
            if each is not None or not is_added
        }
        name, arguments = value.get("name"), value.get("arguments")
        if isinstance(name, str) and isinstance(arguments, Mapping):
            is_added = self._is_exported or isinstance(arguments, Struct)
            made["arguments"] = {
                key: self.turns(each)
                for key, each in arguments.items()
                if each is not None or self._is_meant(name, key, is_added=is_added)
            }
        return made

    def _is_meant(self, function: str, argument: str, *, is_added: bool) -> bool:
        """Whether a call has an argument that is null."""
        known = self._parameters.get(function)
        if known is not None:
            self.has_odd_null |= argument not in known[0]
            if argument not in known[0] or argument in known[1]:
                return argument in known[1]
        if is_added or known is None:
            self.notes[OMITTED if is_added else KEPT] = None
        return not is_added


def _parameters(row: Row, tools: str | None) -> Parameters:
    """The parameters of each function of a row."""
    found: dict[str, tuple[Collection[str], Collection[str]]] = {}
    try:
        listed = structure(row, tools)
    except DataError:  # which its format says
        return found
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
            found[name] = names, required if isinstance(required, list) else []
    return found


def _mapping(value: object) -> JSON:
    return value if isinstance(value, Mapping) else {}
