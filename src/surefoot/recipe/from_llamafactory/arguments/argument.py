"""One argument of LLaMA-Factory: its type, its default, and its counterpart here."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["text", "bool", "int", "float", "list", "mapping", "any"]
_TRUE, _FALSE = ("true", "yes", "y", "1", "on"), ("false", "no", "n", "0", "off")
EXPECTED: dict[Kind, str] = {
    "text": "text",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "list": "a list, or text with commas",
    "mapping": "a mapping, or one in JSON",
    "any": "a value",
}


class RefusedArgumentError(Exception):
    """An argument, or its value, that is not supported, and what to write instead."""

    def __init__(self, argument: str, reason: str) -> None:
        super().__init__(reason)
        self.argument = argument


@dataclass(frozen=True)
class Same:
    """The argument is a setting, with the same value."""

    setting: str
    note: str = ""


@dataclass(frozen=True)
class Combined:
    """A rule makes these settings of the argument, together with others."""

    settings: tuple[str, ...]
    note: str


@dataclass(frozen=True)
class NoEffect:
    """No setting is needed, for this reason."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """Not supported: the reason, and what to do instead. Its default is always accepted."""

    reason: str
    allowed: tuple[object, ...] = ()  # values that ask for nothing


@dataclass(frozen=True)
class OtherCommand:
    """An argument of another command of LLaMA-Factory: what does it here."""

    instead: str


Outcome = Same | Combined | NoEffect | Refused | OtherCommand


@dataclass(frozen=True)
class Argument:
    """An argument of LLaMA-Factory. ``default`` is its value there if nobody sets it."""

    kind: Kind
    default: object
    outcome: Outcome
    choices: tuple[str, ...] = ()

    def read(self, name: str, value: object) -> object:
        """``value`` with the argument's type. Raises ``RefusedArgumentError``: it has another."""
        try:
            found = READERS[self.kind](value)
        except (ValueError, TypeError):
            message = f"expected {EXPECTED[self.kind]}, got {value!r}"
            raise RefusedArgumentError(name, message) from None
        if self.choices and found is not None and str(found) not in self.choices:
            near = difflib.get_close_matches(str(found), self.choices, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            known = ", ".join(self.choices)
            raise RefusedArgumentError(name, f"expected one of {known}, got {found!r}{hint}")
        return found


def same(kind: Kind, default: object, setting: str, note: str = "") -> Argument:
    """An argument that is a setting."""
    return Argument(kind, default, Same(setting, note))


def combined(kind: Kind, default: object, settings: str, note: str, *choices: str) -> Argument:
    """An argument that a rule reads; ``settings`` are separated by commas."""
    names = tuple(name.strip() for name in settings.split(","))
    return Argument(kind, default, Combined(names, note), choices)


def no_effect(kind: Kind, default: object, reason: str) -> Argument:
    """An argument that needs no setting."""
    return Argument(kind, default, NoEffect(reason))


def refused(kind: Kind, default: object, reason: str, *allowed: object) -> Argument:
    """An argument whose default alone is supported, or the values of ``allowed``."""
    return Argument(kind, default, Refused(reason, allowed))


def other_command(kind: Kind, default: object, instead: str) -> Argument:
    """An argument of another command of LLaMA-Factory."""
    return Argument(kind, default, OtherCommand(instead))


def _text(value: object) -> str:
    if isinstance(value, list | dict):
        raise ValueError
    return str(value)


def _bool(value: object) -> bool:
    word = str(value).strip().lower()
    if word not in (*_TRUE, *_FALSE):
        raise ValueError
    return word in _TRUE


def _int(value: object) -> int:
    number = _float(value)
    if number % 1:
        raise ValueError
    return int(number)


def _float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _list(value: object) -> list[object]:
    if isinstance(value, list):
        return [part for item in value for part in _list(item)]
    if isinstance(value, dict):
        raise ValueError
    return [part.strip() for part in str(value).split(",") if part.strip()]


def _mapping(value: object) -> Mapping[str, Any]:
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise ValueError
    return found


READERS: dict[Kind, Callable[[object], Any]] = {
    "text": _text,
    "bool": _bool,
    "int": _int,
    "float": _float,
    "list": _list,
    "mapping": _mapping,
    "any": lambda value: value,
}
