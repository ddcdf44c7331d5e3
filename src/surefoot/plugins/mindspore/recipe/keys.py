"""Rules for the keys of a YAML file of MindSpore Transformers.

A rule converts a value to dotted settings, or raises the reason why it cannot be converted. Rules
for several keys get the whole file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....recipe.document import Document
from ....schema import Keys, Problem

Found = Mapping[str, object]  # dotted settings of ours
KeyRule = Callable[[Any], Found]
Together = Sequence[tuple[Keys, KeyRule]]  # where a rule's error is shown, and the rule


class RefusedKeyError(Exception):
    """Why a value is rejected."""


@dataclass
class Converted:
    """The result for the file."""

    settings: dict[str, object] = field(default_factory=dict)  # dotted, as overrides are
    left: list[str] = field(default_factory=list)  # keys that were not looked at
    advice: list[str] = field(default_factory=list)  # what is to be added by hand
    is_prediction: bool = False  # the settings are those of a ``Prediction``, not of a recipe

    def nested(self) -> dict[str, Any]:
        """The settings as sections of a recipe."""
        found: dict[str, Any] = {}
        for path, value in self.settings.items():
            *sections, name = path.split(".")
            inner = found
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[name] = value
        return found


def apply(document: Document, rules: Mapping[str, KeyRule], together: Together) -> Converted:
    """The settings of the keys of ``document``. Raises ``RecipeError``: with every unsupported key,
    each with line, reason and alternative."""
    told = document.data
    if not isinstance(told, dict):
        raise document.error([Problem((), "expected the keys of MindSpore Transformers")])
    done, problems = Converted(), list[Problem]()
    for path, value in _keys(told):
        rule = rules.get(_name(path))
        if rule is None:
            done.left.append(_name(path))
            continue
        try:
            done.settings |= rule(value)
        except RefusedKeyError as error:
            problems.append(Problem(path, str(error)))
    for path, of_several in together:
        try:
            done.settings |= of_several(told)
        except RefusedKeyError as error:
            problems.append(Problem(path, str(error)))
    if problems:
        raise document.error(problems)
    return done


def _keys(told: Mapping[str, Any]) -> Iterator[tuple[Keys, Any]]:
    """Every key of the top level and of the sections, with its value; callbacks by setting."""
    for key, value in told.items():
        if key == "callbacks" and isinstance(value, list):
            for i, callback in enumerate(value):
                for name, setting in callback.items() if isinstance(callback, dict) else ():
                    if name != "type":
                        yield (key, i, str(callback.get("type")), name), setting
        elif isinstance(value, dict):
            for name, setting in value.items():
                yield (key, name), setting
        else:
            yield (key,), value


def _name(path: Keys) -> str:
    """A key as in the table: a callback's by its type, not its position in the list."""
    return ".".join(str(key) for key in path if not isinstance(key, int))


def to(path: str, kind: type = object) -> KeyRule:
    """The key is the setting ``path``, of the type ``kind``."""

    def rule(value: Any) -> Found:
        if value is None:
            return {}
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise RefusedKeyError(f"expected {kind.__name__}, got {value!r}")
        return {path: value}

    return rule


def nothing(_value: Any) -> Found:
    """The key has no counterpart and needs none."""
    return {}


def only(allowed: tuple[Any, ...], reason: str) -> KeyRule:
    """These values need no setting; any other is rejected for ``reason``."""

    def rule(value: Any) -> Found:
        if value not in allowed:
            raise RefusedKeyError(f"{value!r}: {reason}")
        return {}

    return rule
