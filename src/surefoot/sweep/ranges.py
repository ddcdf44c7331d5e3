"""What a sweep varies, as it is typed: ``1e-5..1e-3:log``, ``8..64``, ``8..64:8``, ``8,16,32``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import RecipeError
from ..recipe.yaml import parse_argument

_NUMBER = r"[+-]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER})\s*\.\.\s*({_NUMBER})\s*(?::\s*(\S+)\s*)?")
_BEGINS_AS_RANGE = re.compile(rf"\s*{_NUMBER}\s*\.\.")
_WHOLE = re.compile(r"[+-]?\d+")
FORMS = "LOW..HIGH, LOW..HIGH:log, LOW..HIGH:STEP or values such as 8,16,32"


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included."""

    low: float
    high: float
    is_integer: bool = False  # whether both ends are written as integers
    is_log: bool = False
    step: float | None = None

    @property
    def count(self) -> int | None:
        """How many numbers it has; None if there is no end of them."""
        if self.step is None:
            return int(self.high - self.low) + 1 if self.is_integer else None
        return round((self.high - self.low) / self.step) + 1

    def value(self, number: float) -> int | float:
        """``number`` as a value of the setting."""
        return round(number) if self.is_integer else float(number)

    def values(self) -> list[object]:
        """All numbers of it, if they can be counted."""
        step = self.step or 1
        return [
            self.value(min(self.high, float(f"{self.low + place * step:.12g}")))  # 0.3, not 0.3…04
            for place in range(self.count or 0)
        ]


@dataclass(frozen=True)
class Choices:
    """A few values."""

    items: tuple[object, ...]

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.items)

    def values(self) -> list[object]:
        """All of them."""
        return list(self.items)

    @property
    def texts(self) -> list[str]:
        """Each as a text of its own, which an override can have as its value."""
        return [as_text(item) for item in self.items]


@dataclass(frozen=True)
class SweptKey:
    """A setting that a sweep varies."""

    key: str  # dotted
    text: str  # its values, as they were typed
    values: Range | Choices

    @property
    def path(self) -> tuple[str, ...]:
        """The way to it in a recipe."""
        return tuple(self.key.split("."))


def as_text(value: object) -> str:
    """A value as YAML on one line."""
    return json.dumps(value, ensure_ascii=False)


def parse_arguments(arguments: Sequence[str]) -> tuple[list[SweptKey], list[str]]:
    """The settings to vary, and the overrides with a single value, which hold for all trials.
    Raises ``RecipeError``."""
    swept: list[SweptKey] = []
    fixed: list[str] = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        key, text = key.strip(), text.strip()
        if not equals or not text or not all(key.split(".")):
            raise RecipeError(
                f"command line: {argument!r}: expected KEY=RANGE such as "
                "optim.adamw.learning_rate=1e-5..1e-3:log; a range is " + FORMS
            )
        values = _values(argument, text)
        if isinstance(values, Choices) and values.count == 1:
            fixed.append(argument)
        else:
            swept.append(SweptKey(key, text, values))
    return swept, fixed


def _values(argument: str, text: str) -> Range | Choices:
    found = _RANGE.fullmatch(text)
    if found is not None:
        return _range(argument, found[1], found[2], found[3])
    if _BEGINS_AS_RANGE.match(text):
        raise RecipeError(f"command line: {argument}: expected {FORMS}")
    items, _ = parse_argument(f"[{text}]", f"command line: {argument}")
    assert isinstance(items, list)
    texts = [as_text(item) for item in items]
    if repeated := [text for number, text in enumerate(texts) if text in texts[:number]]:
        raise RecipeError(f"command line: {argument}: {repeated[0]} is given twice; keep one")
    return Choices(tuple(items))


def _range(argument: str, low_text: str, high_text: str, how: str | None) -> Range:
    place = f"command line: {argument}"
    low, high = float(low_text), float(high_text)
    is_integer = bool(_WHOLE.fullmatch(low_text) and _WHOLE.fullmatch(high_text))
    if not low < high or not math.isfinite(high - low):
        raise RecipeError(f"{place}: {low_text} must be below {high_text}")
    if how == "log":
        if low <= 0:
            raise RecipeError(f"{place}: a logarithmic range must begin above 0, got {low_text}")
        return Range(low, high, is_integer, is_log=True)
    if how is None:
        return Range(low, high, is_integer)
    if not re.fullmatch(_NUMBER, how) or float(how) <= 0:
        raise RecipeError(f"{place}: after ':' expected log or a step above 0, got {how!r}")
    return _stepped(place, Range(low, high, is_integer and bool(_WHOLE.fullmatch(how))), float(how))


def _stepped(place: str, plain: Range, step: float) -> Range:
    steps = (plain.high - plain.low) / step
    if round(steps) < 1 or abs(steps - round(steps)) > 1e-6:
        last = plain.low + math.floor(steps) * step
        raise RecipeError(
            f"{place}: steps of {step:g} from {plain.low:g} end at {last:g}, not at "
            f"{plain.high:g}; write that as the end"
        )
    return Range(plain.low, plain.high, plain.is_integer, step=step)
