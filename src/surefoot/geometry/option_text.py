"""Options on one line, as commands accept them: ``dp_shard=4,tp=2``. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator

from ..errors import CheckpointError


def pairs(
    text: str, known: Collection[str], *, what: str, odd: str, example: str
) -> Iterator[tuple[str, str]]:
    """Parse each name and its value.

    Args:
        text: the option text.
        known: the valid names.
        what: name of the option, for errors.
        odd: message for an unknown name, which replaces ``{}``.
        example: a valid text, for errors.

    Raises ``CheckpointError`` for an unknown name, or one that occurs twice.
    """
    seen = set()
    for item in text.split(","):
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else example
            raise CheckpointError(f"{what} {text!r}: {odd.format(repr(name))}; {hint}")
        if name in seen:
            raise CheckpointError(f"{what} {text!r}: {name} occurs twice")
        seen.add(name)
        yield name, value
