"""Text of others on a terminal: nothing in it that the terminal could act on; and values of others
in JSON: nothing in it that a reader of JSON could not take.

Datasets, models and names of files may contain escape sequences, which move the cursor, set the
title or answer for the user, and marks that turn the direction of writing. Every error, log line
and table goes through here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

# Control characters (C0, DEL, C1) but tab and newline; separators of lines that are no newline;
# marks of the direction of writing (Unicode standard annex 9); halves of characters.
_ACTING = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]"
)
_HALVES = re.compile("[\ud800-\udfff]")
MAX_DEPTH = 64  # of values; Python's and pydantic's writers of JSON end at some hundred
_LARGEST = sys.float_info.max  # an integer of thousands of digits cannot be printed
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def visible(text: str) -> str:
    r"""``text``, each character that a terminal would act on written as JSON does: ``\u001b``.

    Tabs and newlines stay. JSON stays the same JSON.
    """
    return _ACTING.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def one_line(text: str) -> str:
    r"""The same, with tabs and newlines written as ``\t`` and ``\n``."""
    return visible(text).replace("\t", "\\t").replace("\n", "\\n")


def plain(value: object, depth: int = 0) -> Any:
    """``value`` as JSON that every program can read, whatever file it comes from: no halves of
    characters, numbers that are finite and short, and nesting of at most ``MAX_DEPTH``."""
    if isinstance(value, str):  # texts and numbers first, as most values are
        return _HALVES.sub("\ufffd", value)
    if isinstance(value, int | float):
        return value if -_LARGEST <= value <= _LARGEST else None
    if isinstance(value, Mapping | list | tuple) and depth == MAX_DEPTH:
        return "…"
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    return value


def duration(seconds: float) -> str:
    """``1:02:03`` or ``2:03``; ``?`` when unknown."""
    if seconds == float("inf"):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def in_bytes(num_bytes: int | None) -> str:
    """Three digits and a decimal unit, as disks are sold and file managers count."""
    if num_bytes is None:
        return ""
    value, unit = float(num_bytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}"
