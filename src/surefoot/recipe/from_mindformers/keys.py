"""How a YAML file of MindSpore Transformers is read: a table from its keys to rules.

A rule gives what a value comes to here, dotted settings, or raises the reason why there is no such
thing. Rules over several keys are asked with the whole file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...schema import Keys, Problem
from ..document import Document

Found = Mapping[str, object]  # dotted settings of ours
Rule = Callable[[Any], Found]
Together = Sequence[tuple[Keys, Rule]]  # where a rule's error is shown, and the rule


class RefusedError(Exception):
    """Why a value is not taken."""


@dataclass
class Converted:
    """What became of the file."""

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


def apply(document: Document, rules: Mapping[str, Rule], together: Together) -> Converted:
    """The settings that the keys of ``document`` come to.

    Raises:
        RecipeError: with every key that cannot be had here, each with line, reason and way out.
    """
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
        except RefusedError as error:
            problems.append(Problem(path, str(error)))
    for path, of_several in together:
        try:
            done.settings |= of_several(told)
        except RefusedError as error:
            problems.append(Problem(path, str(error)))
    if problems:
        raise document.error(problems)
    return done


def _keys(told: Mapping[str, Any]) -> Iterator[tuple[Keys, Any]]:
    """Every key of the top and of the sections, with its value; callbacks by their settings."""
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
    """A key as the table has it: a callback's by its type, not its place in the list."""
    return ".".join(str(key) for key in path if not isinstance(key, int))


def to(path: str, kind: type = object) -> Rule:
    """It is the setting ``path`` here, of the type ``kind``."""

    def rule(value: Any) -> Found:
        if value is None:
            return {}
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise RefusedError(f"expected {kind.__name__}, got {value!r}")
        return {path: value}

    return rule


def nothing(_value: Any) -> Found:
    """It has no counterpart and needs none."""
    return {}


def only(allowed: tuple[Any, ...], reason: str) -> Rule:
    """These values say nothing here; any other is refused for ``reason``."""

    def rule(value: Any) -> Found:
        if value not in allowed:
            raise RefusedError(f"{value!r}: {reason}")
        return {}

    return rule
