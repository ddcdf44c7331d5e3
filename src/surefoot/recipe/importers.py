"""Importers: other programs whose files become recipes. Plugins name theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ..extensions import Extended
from .document import Document


@dataclass(frozen=True)
class ConvertedFile:
    """A recipe, and notes about it."""

    text: str  # YAML, ends in a newline
    notes: Sequence[str]  # what its data sets need beside it, and the keys that were not looked at


class Importer(Protocol):
    """A program whose YAML files can be converted."""

    title: ClassVar[str]
    """The program, for people."""

    known_by: ClassVar[Sequence[str]]
    """At least one of these keys is in every file of the program that runs anything."""

    def convert(self, document: Document, overrides: Sequence[str]) -> ConvertedFile:
        """The recipe of ``document``; ``overrides`` win. Raises ``RecipeError``: a key cannot be
        had here, with line, reason and way out."""


IMPORTERS: Mapping[str, Importer] = Extended("importers", {})


def importer_of(document: Document) -> Importer | None:
    """The importer that knows ``document``; None if none does."""
    found = document.data
    if not isinstance(found, dict):
        return None
    return next((i for i in IMPORTERS.values() if any(k in found for k in i.known_by)), None)
