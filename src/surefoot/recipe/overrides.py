"""Overrides: settings with precedence over the recipe's.

On the command line ``optim.adamw.learning_rate=5e-5``; from Python a dotted path and its value, or
a section with some of its settings.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence

from ..errors import RecipeError
from ..schema import Keys, Setting, expand, settings
from .document import Document
from .yaml import parse

Overrides = Sequence[str] | Mapping[str, object]  # path=value, or path -> value


def override(cls: type, document: Document, overrides: Overrides) -> Document:
    """``document`` with ``overrides`` applied, the last one winning.

    Raises:
        RecipeError: a text is not ``path=value``. Unknown paths are rejected when the recipe is
            read.
    """
    if isinstance(overrides, Mapping):
        for path, value in overrides.items():
            document = put(cls, document, tuple(path.split(".")), value, "override")
        return document
    for argument in overrides:
        keys, value = _split(argument)
        document = put(cls, document, keys, value, f"command line: {argument}")
    return document


def put(cls: type, document: Document, path: Keys, value: object, origin: str) -> Document:
    """``document`` with ``value`` at ``path``.

    A mapping changes only the settings it names. Naming another variant replaces the current one;
    naming the same one keeps its settings.
    """
    patch = value
    for key in reversed(path):
        patch = {key: patch}
    expanded = expand(cls, patch)
    return dataclasses.replace(
        document,
        data=_merge_section(cls, expand(cls, document.data), expanded),
        overrides={**document.overrides, path: origin},
        overridden=document.overridden | set(_leaves(expanded, ())),
    )


def _leaves(patch: object, path: Keys) -> Iterator[Keys]:
    """The path of every value in ``patch``."""
    if not isinstance(patch, Mapping):
        yield path
        return
    for key, value in patch.items():
        yield from _leaves(value, (*path, key))


def _split(argument: str) -> tuple[Keys, object]:
    path, equals, text = argument.partition("=")
    keys = tuple(path.strip().split("."))
    if not equals or not all(keys):
        raise RecipeError(
            f"command line: {argument!r}: expected an override such as train.max_steps=100"
        )
    return keys, parse(text, f"command line: {argument}").data


def _merge_section(cls: type, old: object, new: object) -> object:
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return old if isinstance(new, Mapping) else new  # what is wrong in the file stays seen
    known = settings(cls)
    merged = {key: _merge(known.get(key), old.get(key), value) for key, value in new.items()}
    return {**old, **merged}


def _merge(setting: Setting | None, old: object, new: object) -> object:
    if setting is None or old is None:
        return new
    if setting.section is not None:
        return _merge_section(setting.section, old, new)
    if setting.choices is not None and isinstance(old, Mapping) and isinstance(new, Mapping):
        return {
            name: _merge_section(setting.choices[name], old[name], settings_of)
            if name in old and name in setting.choices
            else settings_of
            for name, settings_of in new.items()
        }
    if typing.get_origin(setting.hint) is Mapping and isinstance(old, Mapping):
        return {**old, **new} if isinstance(new, Mapping) else new
    return new
