"""The JSON schema of a section, from the same fields and docstrings, for editors and forms."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

from .reading import write_setting
from .setting import WORDS, Setting, markdown, settings

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(cls: type) -> dict[str, Any]:
    """JSON schema of the plain data that ``read(cls, data)`` accepts, including the short forms."""
    return {"$schema": DIALECT, "title": cls.__name__, **_section(cls)}


def _section(cls: type) -> dict[str, Any]:
    known = settings(cls)
    required = [name for name, setting in known.items() if setting.is_required]
    return {
        "description": markdown(inspect.getdoc(cls) or ""),
        "type": "object" if required else ["object", "null"],  # nothing below it: all defaults
        "properties": {name: _described(setting) for name, setting in known.items()},
        "required": required,
        "additionalProperties": False,
    }


def _described(setting: Setting) -> dict[str, Any]:
    schema = _value(setting)
    if setting.doc:
        schema["description"] = setting.doc
    if not setting.is_required:
        schema["default"] = write_setting(setting, setting.default)
    return schema


def _value(setting: Setting) -> dict[str, Any]:
    if setting.choices is not None:
        return _variant(setting.choices)
    if setting.each is not None:
        item = _variant(setting.each.choices)
        if setting.each.of_text is not None:
            item["anyOf"].append({"type": "string"})
        return {"anyOf": [{"type": "array", "items": item}, item]}
    return _section(setting.section) if setting.section is not None else _plain(setting.hint)


def _variant(choices: Mapping[str, type]) -> dict[str, Any]:
    """A name, or one name with settings below it."""
    sections = {name: _section(cls) for name, cls in choices.items()}
    settled = [name for name, section in sections.items() if not section["required"]]
    named = {
        "type": "object",
        "properties": sections,
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }
    return {"anyOf": [{"enum": settled}, named] if settled else [named]}


def _plain(hint: object) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple:
        item = _plain(args[0])
        return {"anyOf": [{"type": "array", "items": item}, item]}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _plain(args[1])}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_plain(arg) for arg in args]}
    return {"type": WORDS[typing.cast(type, hint)][1]}
