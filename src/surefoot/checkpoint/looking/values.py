"""Compare two trees of plain data: every path that differs, with both values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ...errors import counted

What = Literal["differs", "only in A", "only in B"]

PARTS = ("model", "optimizer", "state", "config", "recipe", "versions")  # of a checkpoint
_MANY = 16  # a longer list of plain values is one value


@dataclass(frozen=True)
class ValueChange:
    """One value that differs. For lists of different lengths, their lengths."""

    path: str
    what: What
    a: object = None
    b: object = None


def differences(a: object, b: object, path: str = "") -> list[ValueChange]:
    """All differences of two trees of dicts, lists and plain values, in the order of ``a``."""
    return list(_differences(a, b, path))


def _differences(a: object, b: object, path: str) -> Iterator[ValueChange]:
    if isinstance(a, dict) and isinstance(b, dict):
        yield from _of_dicts(a, b, path)
    elif isinstance(a, list) and isinstance(b, list):
        yield from _of_lists(a, b, path)
    elif not _is_same(a, b):
        yield ValueChange(path, "differs", a, b)


def _of_dicts(
    a: Mapping[object, object], b: Mapping[object, object], path: str
) -> Iterator[ValueChange]:
    for key in [*a, *(key for key in b if key not in a)]:
        here = f"{path}.{key}" if path else str(key)
        if key not in b:
            yield ValueChange(here, "only in A", a=a[key])
        elif key not in a:
            yield ValueChange(here, "only in B", b=b[key])
        else:
            yield from _differences(a[key], b[key], here)


def _of_lists(a: list[object], b: list[object], path: str) -> Iterator[ValueChange]:
    if len(a) != len(b):
        yield ValueChange(path, "differs", counted(len(a), "item"), counted(len(b), "item"))
    elif len(a) > _MANY and not any(isinstance(item, dict | list) for item in a + b):
        if not all(map(_is_same, a, b)):  # a random generator's numbers, say
            yield ValueChange(path, "differs", a, b)
    else:
        for i, (item_a, item_b) in enumerate(zip(a, b, strict=True)):
            yield from _differences(item_a, item_b, f"{path}[{i}]")


def _is_same(a: object, b: object) -> bool:
    """``==``, but True is not 1, and nan is itself."""
    if (a != a) and (b != b):  # noqa: PLR0124
        return True
    return a == b and isinstance(a, bool) == isinstance(b, bool)
