"""Overrides: settings with precedence over the recipe's.

On the command line ``optim.adamw.learning_rate=5e-5``, where the value of a setting that holds text
is what the shell passed, and every other is YAML; from Python a dotted path and its value, or
a section with some of its settings.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..errors import RecipeError
from ..schema import Keys, Problem, Setting, expand, idle, is_text, setting_at, settings
from .yaml import Document, parse_argument, parse_text

Overrides = Sequence[str] | Mapping[str, object]  # path=value, or path -> value


def override(cls: type, document: Document, overrides: Overrides) -> Document:
    """``document`` with ``overrides`` applied, the last one winning.

    Raises:
        RecipeError: a text is not ``path=value``. Unknown paths are rejected when the recipe is
            read.
    """
    if isinstance(overrides, Mapping):
        changes: list[tuple[Keys, object, str]] = [
            (tuple(path.split(".")), value, f"override: {path}")
            for path, value in overrides.items()
        ]
    else:
        changes = [(*_split(cls, argument), f"command line: {argument}") for argument in overrides]
    _refuse_two_variants(cls, changes)
    for path, value, origin in changes:
        document = put(
            cls, document, path, value, origin.removesuffix(f": {'.'.join(map(str, path))}")
        )
    return document


def _refuse_two_variants(cls: type, changes: Sequence[tuple[Keys, object, str]]) -> None:
    """Raise ``RecipeError`` if settings of one variant meet another one: ``method=full
    method.lora.rank=8`` can mean either. Of variants alone, the last one wins."""
    variants: dict[Keys, tuple[str, bool, str]] = {}
    for path, value, origin in changes:
        for place, name, has_settings in _variants(cls, expand(cls, _patch(path, value)), ()):
            before, had_settings, other = variants.get(place, (name, False, ""))
            if name != before and (has_settings or had_settings):
                where = ".".join(map(str, place))
                raise RecipeError(
                    f"{origin}: {where} would be {name}, but {other.partition(': ')[2]} makes it "
                    f"{before}; leave one of the two out"
                )
            variants[place] = name, has_settings or (had_settings and name == before), origin


def _variants(cls: type, patch: object, path: Keys) -> Iterator[tuple[Keys, str, bool]]:
    """The variants that ``patch`` names: their setting, the name, and whether it has settings."""
    section_settings = settings(cls) if isinstance(patch, Mapping) else {}
    for key, value in patch.items() if isinstance(patch, Mapping) else ():
        setting, here = section_settings.get(str(key)), (*path, key)
        if setting is not None and setting.section is not None:
            yield from _variants(setting.section, value, here)
        elif setting is not None and setting.choices is not None and isinstance(value, Mapping):
            for name, inside in value.items():
                yield here, str(name), bool(inside)
                if name in setting.choices:
                    yield from _variants(setting.choices[name], inside, (*here, name))


def _patch(path: Keys, value: object) -> object:
    """``value`` inside a mapping for each key of ``path``."""
    for key in reversed(path):
        value = {key: value}
    return value


def put(cls: type, document: Document, path: Keys, value: object, origin: str) -> Document:
    """``document`` with ``value`` at ``path``.

    A mapping changes only the settings it names. Naming another variant replaces the current one;
    naming the same one keeps its settings.
    """
    expanded = expand(cls, _patch(path, value))
    return dataclasses.replace(
        document,
        data=_merge_section(cls, expand(cls, document.data), expanded),
        overrides={**document.overrides, path: origin},
        overridden=document.overridden | set(leaves(expanded)),
    )


def leaves(patch: object, path: Keys = ()) -> Iterator[Keys]:
    """The path of every value in ``patch``."""
    if not isinstance(patch, Mapping):
        yield path
        return
    for key, value in patch.items():
        yield from leaves(value, (*path, key))


def idle_settings(
    section: object, document: Document, stated: Document | None
) -> Iterator[Problem]:
    """The problems of settings that do nothing, and that an override of ``document`` names; or
    the file ``stated``, unless an override has switched off what they need."""
    in_file = set() if stated is None else set(leaves(expand(type(section), stated.data)))

    def is_said(path: Keys, others: Sequence[Keys]) -> bool:
        overridden = document.overridden
        return path in overridden or (path in in_file and overridden.isdisjoint(others))

    return idle(section, is_said)


def _split(cls: type, argument: str) -> tuple[Keys, object]:
    path, equals, text = argument.partition("=")
    keys = tuple(path.strip().split("."))
    if not equals or not all(keys):
        raise RecipeError(
            f"command line: {argument!r}: expected an override such as train.max_steps=100"
        )
    return keys, _value(setting_at(cls, keys), text, f"command line: {argument}")


def _value(setting: Setting | None, text: str, place: str) -> object:
    """``text`` as a value of ``setting``: as it is where that holds text, otherwise as YAML."""
    hint = None if setting is None or setting.variants or setting.section else setting.hint
    if typing.get_origin(hint) is tuple and text.lstrip()[:1] not in ("[", "{"):
        hint = typing.get_args(hint)[0]  # one item, which stands for a list
    if is_text(hint):
        return parse_text(text)
    data = parse_argument(text, place)
    args = typing.get_args(hint)
    if isinstance(data, list) and args and is_text(args[0]):
        # a text of a list is as it is written, too: 007 and not 7
        written = parse_argument(text, place, as_written=True)
        assert isinstance(written, list)
        pairs = zip(data, written, strict=True)
        return [text if isinstance(text, str) else item for item, text in pairs]
    return data


def _merge_section(cls: type, old: object, new: object) -> object:
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return old if isinstance(new, Mapping) else new  # what is wrong in the file stays seen
    section_settings = settings(cls)
    merged = {
        key: _merge(section_settings.get(key), old.get(key), value) for key, value in new.items()
    }
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


_KEY = re.compile(r"--[A-Za-z][\w-]*(=.*)?", re.DOTALL)


def read_arguments(
    words: Sequence[str], takes_several: Callable[[str], bool]
) -> tuple[dict[str, list[str]], list[str]]:
    """The values of each argument of another program's ``--name value ...``, and the overrides of a
    recipe among them, which have a dot before ``=``. Raises ``RecipeError``: a value belongs to no
    argument, or an argument occurs twice."""
    values: dict[str, list[str]] = {}
    overrides: list[str] = []
    name = ""
    for word in words:
        if _KEY.fullmatch(word):
            key, equals, value = word[2:].partition("=")
            name = key.replace("-", "_")
            if name in values:
                raise RecipeError(f"command line: --{name} occurs twice; keep one")
            values[name] = [value] if equals else []
        elif _is_override(word):
            overrides.append(word)
        elif not name or (values[name] and not takes_several(name)):
            raise RecipeError(f"command line: {word!r} belongs to no argument; write --name value")
        else:
            values[name].append(word)
    return values, overrides


def _is_override(word: str) -> bool:
    """Whether a word sets a field of a recipe: ``optim.adamw.learning_rate=1e-5``."""
    path, equals, _ = word.partition("=")
    # A path of a file may have a dot and an equals sign, too.
    return bool(equals) and "." in path and "/" not in path
