"""The arguments of other trainers, as ``arguments.yaml`` lists them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from ...errors import did_you_mean

OUTCOMES = ("is", "makes", "ignored", "refused", "command")
_TRUE, _FALSE = ("true", "yes", "y", "1", "on"), ("false", "no", "n", "0", "off")


class RefusedError(Exception):
    """An argument, or its value, that is not supported, and what to write instead."""

    def __init__(self, argument: str, reason: str) -> None:
        super().__init__(reason)
        self.argument = argument


@dataclass(frozen=True)
class Argument:
    """One argument and its counterpart here; ``arguments.yaml`` documents the fields."""

    kind: str
    default: object  # there, if nobody sets it
    outcome: str  # one of OUTCOMES
    settings: tuple[str, ...]  # of ``is`` and ``makes``
    says: str  # the note, or the reason
    choices: tuple[str, ...] = ()
    allowed: tuple[object, ...] = ()  # values of one that is refused which ask for nothing

    def read(self, name: str, value: object) -> object:
        """``value`` with the argument's type. Raises ``RefusedError``: it has another."""
        expected, read = _KINDS[self.kind]
        try:
            converted = read(value)
        except (ValueError, TypeError):
            message = f"expected {expected}, got {value!r}"
            raise RefusedError(name, message) from None
        if self.choices and str(converted) not in self.choices:
            problem = f"expected one of {', '.join(self.choices)}, got {converted!r}"
            raise RefusedError(name, problem + did_you_mean(str(converted), self.choices))
        return converted

    def refuses(self, value: object) -> bool:
        """Whether ``value`` asks for what is not supported."""
        is_off = self.kind == "any" and str(value).lower() in _FALSE
        is_set = value not in (self.default, None, "", [], {}, *self.allowed)
        return self.outcome == "refused" and is_set and not is_off


def _text(value: object) -> str:
    if isinstance(value, list | dict):
        raise ValueError
    return str(value)


def _bool(value: object) -> bool:
    word = str(value).strip().lower()
    if word not in (*_TRUE, *_FALSE):
        raise ValueError
    return word in _TRUE


def _float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _int(value: object) -> int:
    number = _float(value)
    # 1e3 is a float in YAML, and a whole number there.
    if number % 1:
        raise ValueError
    return int(number)


def _list(value: object) -> list[object]:
    if isinstance(value, list):
        # Each word of a command line may have commas of its own.
        return [part for item in value for part in _list(item)]
    return [part.strip() for part in _text(value).split(",") if part.strip()]


def _numbers(value: object) -> list[float]:
    return [_float(part) for part in _list(value)]


def _mapping(value: object) -> Mapping[str, Any]:
    mapping = json.loads(value) if isinstance(value, str) else value
    if not isinstance(mapping, dict):
        raise ValueError
    return mapping


_KINDS: Mapping[str, tuple[str, Callable[[object], Any]]] = {
    "text": ("text", _text),
    "bool": ("true or false", _bool),
    "int": ("a whole number", _int),
    "float": ("a number", _float),
    "list": ("a list, or text with commas", _list),
    "numbers": ("numbers, or text with commas", _numbers),
    "mapping": ("a mapping, or one in JSON", _mapping),
    "any": ("a value", lambda value: value),
}

Rows = Mapping[str, Argument]
_TABLES = YAML(typ="safe").load(Path(__file__).with_name("arguments.yaml"))


def _rows(group: Mapping[str, Any]) -> Iterator[tuple[str, Argument]]:
    for name, row in group.items():
        if name == "like":
            for part in row:
                yield from _rows(_TABLES["parts"][part])
        elif name == "shared":
            yield from ((key, ARGUMENTS[key]) for key in row.split())
        elif name in ("ignored", "refused"):
            for reason, names in row.items():
                yield from ((key, Argument("any", None, name, (), reason)) for key in names.split())
        else:
            yield name, _argument(row)


def _argument(row: Mapping[str, Any]) -> Argument:
    kind, default = next(iter(row.items()))
    outcome = next(name for name in OUTCOMES if name in row)
    counterpart = row[outcome]  # settings, or the reason why there are none
    choices, allowed = tuple(row.get("of", ())), tuple(row.get("but", ()))
    if outcome in ("is", "makes"):
        settings = (counterpart,) if isinstance(counterpart, str) else tuple(counterpart)
        return Argument(kind, default, outcome, settings, row.get("note", ""), choices)
    return Argument(kind, default, outcome, (), counterpart, choices, allowed)


def _tables(kind: str) -> Mapping[str, Rows]:
    return {title: dict(_rows(group)) for title, group in _TABLES[kind].items()}


GROUPS, FILES = _tables("llamafactory"), _tables("files")
ARGUMENTS: Rows = {name: row for group in GROUPS.values() for name, row in group.items()}
TRAINERS = _tables("trainers")
TRANSFORMERS: Rows = {
    **{n: row for n, row in GROUPS["Hugging Face's training arguments"].items() if n != "do_train"},
    **GROUPS["Hugging Face's former training arguments"],
}
