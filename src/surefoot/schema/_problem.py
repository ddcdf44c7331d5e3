"""Validation errors that a person can act on: where, found, expected, did you mean."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from pydantic_core import ErrorDetails

from ..errors import similar
from ._setting import (
    UNSET,
    Keys,
    Setting,
    describe,
    is_section,
    paths,
    setting_at,
    settings,
    variant_name,
)


@dataclass(frozen=True)
class Problem:
    """One validation error, and its location in the data."""

    path: Keys
    message: str

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.message}" if self.path else self.message


_BOUNDS: Mapping[str, Callable[[float], bool]] = {
    "be positive": lambda value: value > 0,
    "not be negative": lambda value: value >= 0,
    "be at least 1": lambda value: value >= 1,
    "be between 0 and 1": lambda value: 0 < value < 1,
    "be from 0 to 1": lambda value: 0 <= value <= 1,
    "be in [0, 1)": lambda value: 0 <= value < 1,
}


def must(section: object, bound: str, *names: str) -> None:
    """Raise ``ValueError`` unless the settings of these ``names`` are within a bound, or None."""
    for name in names:
        value = getattr(section, name)
        if value is not None and not _BOUNDS[bound](value):
            raise ValueError(f"{name} must {bound}, got {value}")


def dotted(path: Keys) -> str:
    """``("data", "datasets", 0)`` as text: ``data.datasets[0]``."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{_word(key)}" for key in path)
    return text.removeprefix(".")


def _word(key: str) -> str:
    """A key for a message: unchanged, or quoted if it would be invisible."""
    return key if key.strip() == key != "" and key.isprintable() else repr(key)


def idle(root: object, is_said: Callable[[Keys, Sequence[Keys]], bool]) -> Iterator[Problem]:
    """The settings under the section ``root`` that do nothing, as none of the others that they need
    has the value for it (``Needs``). ``is_said`` gets the path of one and those of the others, and
    returns whether it is meant."""
    yield from _idle(root, root, (), is_said)


def _idle(
    root: object, section: Any, path: Keys, is_said: Callable[[Keys, Sequence[Keys]], bool]
) -> Iterator[Problem]:
    cls: type = type(section)
    for name, setting in settings(cls).items():
        value, here, needs = getattr(section, name), (*path, name), setting.needs
        if is_section(value):
            variant = (variant_name(setting.choices, value),) if setting.choices else ()
            yield from _idle(root, value, (*here, *variant), is_said)
        if needs is None or value == setting.default or isinstance(value, UNSET):
            continue
        others = needs.paths(path)
        holders = [section if way[:-1] == path else root for way in others]
        keys = [way[-1:] if way[:-1] == path else way for way in others]
        values = (attrgetter(".".join(map(str, k)))(h) for k, h in zip(keys, holders, strict=True))
        if not any(map(needs.is_met, values)) and is_said(here, others):
            names = " or ".join(map(dotted, others))
            yield Problem(here, f"has no effect unless {names} {needs}; set that, or leave it out")


_NO_NAMES: Mapping[str, str] = {}


@dataclass(frozen=True)
class _Spot:
    """Convert a location of pydantic's to a path of settings."""

    path: Keys  # as far as there are settings
    owner: type  # the section that the last key belongs to
    setting: Setting | None = None  # what that key is; None below a variant's name, or if unknown
    section: type | None = None  # the section it leads to


def _trace(root: type, loc: Keys) -> _Spot:
    spot = _Spot((), root, section=root)
    for key in loc:
        choices = spot.setting.choices if spot.setting else None
        key_path = (*spot.path, key)
        if spot.section is not None:
            setting = settings(spot.section).get(str(key))
            spot = _Spot(key_path, spot.section, setting, setting.section if setting else None)
        elif choices is not None and key in choices:
            spot = _Spot(key_path, choices[str(key)], section=choices[str(key)])
        elif isinstance(key, int) and spot.setting is not None and spot.setting.each is not None:
            item = dataclasses.replace(spot.setting, choices=spot.setting.each.choices, each=None)
            spot = dataclasses.replace(spot, path=key_path, setting=item)
        elif isinstance(key, int) or _is_mapping(spot.setting):
            spot = dataclasses.replace(spot, path=key_path)
        else:  # an unknown variant, or pydantic's name for one arm of a union
            break
    return spot


def _is_mapping(setting: Setting | None) -> bool:
    return setting is not None and typing.get_origin(setting.hint) is Mapping


def explain(
    root: type, data: object, error: ErrorDetails, names: Mapping[str, str] = _NO_NAMES
) -> Problem:
    """Convert an error of pydantic in ``data`` for ``root`` to a message for people. ``names`` has
    what to say of keys that other programs have."""
    # the adapter reads a tuple of one, so every location starts with its index, 0
    spot = _trace(root, error["loc"][1:])
    if error["type"] == "value_error":  # raised by __post_init__: a fact about this section alone
        return _own_problem(spot, str(error["ctx"]["error"]))
    if error["type"] == "json_invalid":
        return Problem((), f"not plain data: {error['msg']}")
    value = _look_up(data, spot.path)
    is_missing = error["type"] == "missing"
    vocabulary = _Vocabulary(root, data, names)
    return Problem(spot.path, _message(vocabulary, spot, value, is_missing=is_missing))


def _message(vocabulary: _Vocabulary, spot: _Spot, value: object, *, is_missing: bool) -> str:
    if is_missing and spot.setting is not None:
        return f"missing; {_needed(spot.setting)}"
    if spot.section is not None:
        return f"expected a section (key: value), got {_shown(value)}"
    if spot.setting is None:
        return f"unknown key{vocabulary.by_others(spot.path) or _hint(vocabulary, spot)}"
    if spot.setting.each is not None:
        return f"expected {spot.setting.expected}, got {_shown(value)}"
    if spot.setting.choices is not None:
        return _wrong_variant(vocabulary, spot, spot.setting.choices, value)
    return _wrong_value(spot, spot.setting.hint, value)


def _own_problem(spot: _Spot, message: str) -> Problem:
    """A section's own error, attributed to the field whose name it starts with."""
    name = message.split(maxsplit=1)[0].rstrip(":") if message.strip() else ""
    if name not in settings(spot.section or spot.owner):
        return Problem(spot.path, message)
    for opening in (f"{name}: ", f"{name} must "):
        if message.startswith(opening):
            message = message[len(name) :].lstrip(": ")
    return Problem((*spot.path, name), message)


def _needed(setting: Setting) -> str:
    """What to write if the value is missing."""
    if setting.section is None:
        return f"expected {setting.expected}"
    required = [name for name, s in settings(setting.section).items() if s.is_required]
    return f"expected a section with {', '.join(required)}"


def _wrong_variant(
    vocabulary: _Vocabulary, spot: _Spot, choices: Mapping[str, type], value: object
) -> str:
    expected = "expected one of " + ", ".join(choices)
    if not isinstance(value, Mapping):
        return f"{expected}, got {_shown(value)}"
    unknown = [name for name in value if name not in choices]
    if not unknown:
        return f"{expected}, got {' and '.join(value) or 'none of them'}"
    # a key with a value may be a setting at the wrong place; a bare name is a variant
    path = (*spot.path, unknown[0])
    is_bare = value[unknown[0]] in (None, {})
    elsewhere = [] if is_bare else vocabulary.elsewhere(path, unknown[0])
    hint = "" if is_bare else vocabulary.by_others(path) or _did_you_mean(elsewhere)
    hint = hint or _did_you_mean(_misspelled(unknown[0], choices))
    return f"{expected}, got {unknown[0]!r}{hint}"


def _wrong_value(spot: _Spot, hint: object, value: object) -> str:
    expected = hint
    if isinstance(spot.path[-1], int):
        expected = typing.get_args(hint)[0]
    elif spot.setting is not None and _is_mapping(spot.setting):
        is_item = spot.path[-1] != spot.setting.name
        expected = typing.get_args(hint)[1] if is_item else hint
    literals = [str(arg) for arg in typing.get_args(expected)] if isinstance(value, str) else []
    close = [name for name in literals if name == _TYPES.get(str(value).lower())]
    hint = _did_you_mean(close or similar(str(value), literals))
    return f"expected {describe(expected)}, got {_shown(value)}{hint}"


def _hint(vocabulary: _Vocabulary, spot: _Spot) -> str:
    siblings = settings(spot.owner)
    word = str(spot.path[-1])
    close = vocabulary.elsewhere(spot.path, word) or _misspelled(word, siblings)
    close = close or vocabulary.misspelled_elsewhere(spot.path)
    return _did_you_mean(close) or (
        "; expected one of " + ", ".join(siblings) if siblings else "; no keys are expected here"
    )


def _did_you_mean(proposals: Sequence[str]) -> str:
    return f" (did you mean {' or '.join(proposals[:3])}?)" if proposals else ""


def _plain(word: object) -> str:
    return str(word).lower().lstrip("-").replace("-", "_")


_TYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_TYPES |= {long: short for short, long in _TYPES.items()}  # both are settings' values


def _misspelled(word: str, names: Iterable[str]) -> list[str]:
    """The one of ``names`` that ``word`` is with a typing error. A name that has another word,
    number or first letter is that of another thing: ``shuffle_seed`` is not ``shuffle``, ``beta3``
    not ``beta1``, ``dora`` not ``lora``."""
    word = _plain(word)
    close = similar(word, names, 3, cutoff=0.75)
    return [other for other in close if _is_spelling(word, other)][:1]


def _is_spelling(word: str, other: str) -> bool:
    if sorted(word) == sorted(other):  # two letters changed places
        return True
    if re.findall(r"\d+", word) != re.findall(r"\d+", other) or word[:1] != other[:1]:
        return False
    # `learningrate` is `learning_rate`.
    if _likeness(word.replace("_", ""), other.replace("_", "")) >= 0.9:
        return True
    words = [part for part in word.split("_") if part]
    return all(
        any(_likeness(a, b) >= 0.75 and abs(len(a) - len(b)) <= 2 for b in other.split("_"))
        for a in words
    )


def _likeness(word: str, other: str) -> float:
    return difflib.SequenceMatcher(None, word, other).ratio()


@dataclass(frozen=True)
class _Vocabulary:
    """All settings under ``root``, what other programs call them, and what the user chose."""

    root: type
    data: object
    names: Mapping[str, str]

    def by_others(self, path: Keys) -> str:
        """What to say of the last key of ``path``; a key with its section comes before the key."""
        words = [_plain(key) for key in path]
        hint = self.names.get(".".join(words[-2:])) or self.names.get(words[-1]) or ""
        return re.sub(r"\w+(\.\w+){2}", lambda match: self._of_chosen(match[0]), hint)

    def elsewhere(self, path: Keys, name: str) -> list[str]:
        """Where ``name`` is a setting that the user can set, other than at ``path``."""
        ways = [way for way in self._chosen(path) if way[-1] == _plain(name)]
        # One of each section: reversed(), so that the first of it remains.
        return sorted(dotted(way) for way in {way[0]: way for way in reversed(ways)}.values())

    def misspelled_elsewhere(self, path: Keys) -> list[str]:
        """Where the last key of ``path`` is one with a typing error, in other sections."""
        names = _misspelled(str(path[-1]), [str(way[-1]) for way in self._chosen(path)])
        return self.elsewhere(path, names[0]) if names else []

    def _chosen(self, path: Keys) -> list[Keys]:
        return [way for way in paths(self.root) if self._is_chosen(way, path)]

    def _is_chosen(self, way: Keys, path: Keys) -> bool:
        """Whether the variants on ``way`` are the user's, or one is being chosen by ``path``."""
        for end in range(1, len(way)):
            setting = setting_at(self.root, way[:end])
            if setting is not None and setting.choices is not None:
                chosen = self._variants(way[:end], setting.choices)
                if way[end] not in chosen and (chosen or path[:-1] != way[:end]):
                    return False
        return True

    def _variants(self, path: Keys, choices: Mapping[str, type]) -> list[str]:
        value = _look_up(self.data, path)
        names = value if isinstance(value, Mapping) else [value]
        return [name for name in choices if name in names]

    def _of_chosen(self, text: str) -> str:
        """The setting ``text`` of a variant, or that of the same name of the user's variant."""
        section, _, name = text.split(".")
        setting = setting_at(self.root, (section,))
        choices = (setting.choices if setting else None) or {}
        for variant in self._variants((section,), choices):
            if name in settings(choices[variant]):
                return f"{section}.{variant}.{name}"
        return text


def _look_up(data: object, path: Keys) -> object:
    """The value at ``path``; None if there is none."""
    for key in path:
        if isinstance(data, Mapping):
            data = data.get(key)
        else:
            data = data[key] if isinstance(data, list) and isinstance(key, int) else None
    return data


def _shown(value: object) -> str:
    """A value for an error message, on one short line."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text if text.isprintable() else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
