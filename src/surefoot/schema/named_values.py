"""Texts such as ``dp_shard=4,tp=2``, which name several settings, and sizes such as ``24GB``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import ClassVar

from ..errors import CheckpointError, similar

_UNITS = ("", "K", "M", "G", "T")
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *(?:([KMGT]?)(i?)B?)", re.IGNORECASE)


class ByteSize(int):
    """A number of bytes, written ``24GB``, ``500MiB`` or as a plain number."""

    metavar: ClassVar[str] = "SIZE"

    @classmethod
    def from_text(cls, text: str) -> ByteSize:
        """Raises ``CheckpointError`` if it is no size."""
        match = _SIZE.fullmatch(text.strip())
        base = 1024 if match and match[3] else 1000
        size = int(float(match[1]) * base ** _UNITS.index(match[2].upper())) if match else 0
        if size < 1:
            raise CheckpointError(f"expected a size such as 24GB or 500MiB, got {text!r}")
        return cls(size)


def pairs(
    text: str, allowed: Collection[str], *, option: str, odd: str, example: str
) -> Iterator[tuple[str, str]]:
    """Each name and its value. Raises ``CheckpointError`` for a name that occurs twice, and
    ``odd``, with the name in it, for an unknown one."""
    seen = set()
    for item in text.split(","):
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in allowed:
            near = similar(name, allowed)
            hint = f"did you mean {near[0]}?" if near else example
            raise CheckpointError(f"{option} {text!r}: {odd.format(repr(name))}; {hint}")
        if name in seen:
            raise CheckpointError(f"{option} {text!r}: {name} occurs twice")
        seen.add(name)
        yield name, value
