"""Plain data to sections and back, and the JSON schema of that data, for editors and forms.

Short forms are expanded, then pydantic validates.
"""

from __future__ import annotations

import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ..errors import RecipeError, counted
from ._problem import Problem, explain
from ._setting import (
    UNSET,
    WORDS,
    Keys,
    Setting,
    Unset,
    Variants,
    all_variants,
    is_section,
    markdown,
    settings,
    variant_name,
)
from .locations import DatasetReference

T = TypeVar("T")
MAX_PROBLEMS = 100  # that are explained; similar names are looked for in each
MAX_DEPTH = 32  # a recipe is four levels deep
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def recipe_error(problems: Sequence[Problem]) -> Exception:
    """All problems as one error, one per line."""
    return RecipeError("\n".join(map(str, problems)))


def read(
    cls: type[T],
    data: object,
    fail: Callable[[Sequence[Problem]], Exception] = recipe_error,
    names: Callable[[], Mapping[str, str]] = dict,
) -> T:
    """Build ``cls`` from plain ``data``. ``names`` has what to say of keys of other programs.

    Raises:
        fail(problems): by default a ``RecipeError``, with every problem there is.
    """
    section: type = cls
    plain = expand(section, data)
    try:
        text = json.dumps([plain])
    except (TypeError, ValueError) as error:
        problems = [*_objects(plain)] or [Problem((), f"not plain data: {error}")]
        raise fail(problems) from None
    try:
        return typing.cast(T, _adapter(section, all_variants(section)).validate_json(text)[0])
    except ValidationError as error:
        errors = error.errors(include_url=False)
        problems = [explain(section, plain, e, names()) for e in errors[:MAX_PROBLEMS]]
        if more := len(errors) - len(problems):
            problems.append(Problem((), f"and {counted(more, 'more problem')}"))
        # Once each: pydantic reports all arms of a union, which are one setting here.
        raise fail(list(dict.fromkeys(problems))) from None


def _objects(plain: object, path: Keys = ()) -> Iterator[Problem]:
    """What is in ``plain`` that no recipe can say."""
    if len(path) > MAX_DEPTH:  # it contains itself
        return
    if isinstance(plain, Mapping):
        for key, value in plain.items():
            yield from _objects(value, (*path, str(key)))
    elif isinstance(plain, list | tuple):
        for index, value in enumerate(plain):
            yield from _objects(value, (*path, index))
    elif not isinstance(plain, str | int | float | None):
        message = f"expected plain data, got an object of type {type(plain).__name__}"
        yield Problem(path, f"{message}; surefoot.train has arguments for objects")


@functools.cache
def _adapter(cls: type, _known: tuple[type, ...]) -> TypeAdapter[tuple[Any]]:
    # Kept for the variants there are: a stage added later needs an adapter that knows it.
    # JSON mode is strict about values, yet takes lists for tuples, text for paths and mappings for
    # dataclasses. The tuple around cls carries the config, which a dataclass cannot be given here.
    tuple_of_one: Any = types.GenericAlias(tuple, (cls,))
    return TypeAdapter(tuple_of_one, config=STRICT)


def expand(cls: type, data: object) -> object:
    """Expand the short forms: ``lora`` is ``{lora: {}}``, nothing is ``{}``, one item is a list.

    Instances of ``cls`` and of the variants become mappings, without what is ``Unset``. Values that
    fit nowhere are not changed.
    """
    if data is None:
        return {}
    if isinstance(data, cls):
        values = {name: getattr(data, name) for name in settings(cls)}
        data = {name: value for name, value in values.items() if not isinstance(value, UNSET)}
    if not isinstance(data, Mapping):
        return data
    by_name = settings(cls)
    return {str(key): _expand_value(by_name.get(str(key)), value) for key, value in data.items()}


def _expand_value(setting: Setting | None, value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    if setting is None:
        return value
    if setting.choices is not None:
        return _expand_variant(setting.choices, value)
    if setting.section is not None:
        return expand(setting.section, value)
    if typing.get_origin(setting.hint) is tuple:
        return _expand_list(setting, value)
    return value


def _expand_list(setting: Setting, value: object) -> object:
    """A list; of one item, if ``value`` is one."""
    if (each := setting.each) is not None:
        items = value if isinstance(value, list | tuple) else [value]
        return [_expand_variant(each.choices, _named(each, item)) for item in items]
    is_dataset = typing.get_args(setting.hint)[0] is DatasetReference
    if isinstance(value, str | int | float) or (is_dataset and isinstance(value, Mapping)):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    return [item.source if isinstance(item, DatasetReference) else item for item in value]


def _named(each: Variants, value: object) -> object:
    """A text that is no variant's name as the variant that it is short for."""
    if not isinstance(value, str) or value in each.choices or each.of_text is None:
        return value
    name, key = each.of_text
    return {name: {key: str(value)}}


def _expand_variant(choices: Mapping[str, type], value: object) -> object:
    if isinstance(value, str):
        value = {value: None}
    for name, cls in choices.items():
        if type(value) is cls:
            value = {name: value}
    if not isinstance(value, Mapping):
        return value
    return {
        str(name): expand(choices[name], inner) if name in choices else inner
        for name, inner in value.items()
    }


def write(value: object) -> Any:
    """The plain data from which ``read`` gives ``value``; every setting is included.

    A variant without settings is written as its name alone.
    """
    if is_section(value):
        cls: type = type(value)
        return {name: write_setting(s, getattr(value, name)) for name, s in settings(cls).items()}
    if isinstance(value, tuple | list):
        return [write(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): write(item) for name, item in value.items()}
    if isinstance(value, DatasetReference):
        return value.source
    if isinstance(value, Unset):
        return int(value)
    return str(value) if isinstance(value, Path | str) else value


def write_setting(setting: Setting, value: object) -> Any:
    """The same for the value of one setting, which may be a variant."""
    if setting.each is not None and isinstance(value, tuple):
        return [_write_variant(setting.each.choices, variant) for variant in value]
    return write(value) if setting.choices is None else _write_variant(setting.choices, value)


def _write_variant(choices: Mapping[str, type], value: object) -> Any:
    name = variant_name(choices, value)
    return {name: write(value)} if settings(choices[name]) else name


DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(cls: type) -> dict[str, Any]:
    """JSON schema of the plain data that ``read(cls, data)`` accepts, including the short forms."""
    return {"$schema": DIALECT, "title": cls.__name__, **_section(cls)}


def _section(cls: type) -> dict[str, Any]:
    by_name = settings(cls)
    required = [name for name, setting in by_name.items() if setting.is_required]
    return {
        "description": markdown(inspect.getdoc(cls) or ""),
        "type": "object" if required else ["object", "null"],  # nothing below it: all defaults
        "properties": {name: _described(setting) for name, setting in by_name.items()},
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
    with_settings = {
        "type": "object",
        "properties": sections,
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }
    return {"anyOf": [{"enum": settled}, with_settings] if settled else [with_settings]}


def _plain(hint: object) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
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
