"""Texts such as ``dp_shard=4,tp=2``, which name several settings."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator

from ..errors import CheckpointError


def pairs(
    text: str, known: Collection[str], *, option: str, odd: str, example: str
) -> Iterator[tuple[str, str]]:
    """Each name and its value. Raises ``CheckpointError`` for a name that occurs twice, and
    ``odd``, with the name in it, for an unknown one."""
    seen = set()
    for item in text.split(","):
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else example
            raise CheckpointError(f"{option} {text!r}: {odd.format(repr(name))}; {hint}")
        if name in seen:
            raise CheckpointError(f"{option} {text!r}: {name} occurs twice")
        seen.add(name)
        yield name, value
