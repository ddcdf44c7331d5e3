"""Settings of other sections that a stage does not use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..data.section import DataSection
from ..schema import Problem


def without_effect(data: DataSection, names: Sequence[str], reason: str) -> Iterator[Problem]:
    """The problems of settings of ``data`` that are set, but have no effect for this ``reason``."""
    for name in names:
        if getattr(data, name):
            yield Problem(("data", name), f"has no effect with {reason}")
