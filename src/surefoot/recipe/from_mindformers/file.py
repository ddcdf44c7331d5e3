"""A YAML file of MindSpore Transformers to the text of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..document import Document
from ..files import read_text
from ..overrides import override
from ..prediction import Prediction
from ..recipe import Recipe
from ..yaml import emit, parse
from .conversion import convert


@dataclass(frozen=True)
class ConvertedFile:
    """A recipe, and notes about it."""

    text: str  # YAML, ends in a newline
    notes: Sequence[str]  # what its data sets need beside it, and the keys that were not looked at


def convert_file(path: Path, overrides: Sequence[str] = ()) -> ConvertedFile:
    """The recipe of ``path``, or what ``surefoot predict`` takes in its place; ``overrides`` win.

    Raises ``RecipeError``: a key cannot be had here, each with line, reason and way out.
    """
    found = convert(parse(read_text(path), str(path)))
    kind = Prediction if found.is_prediction else Recipe
    text = emit(override(kind, Document(found.nested()), overrides).data)
    names_data = any(each.startswith("data.datasets") for each in overrides)
    notes = list(found.advice) if found.is_prediction or not names_data else []
    if found.left:
        notes.append(f"not used: {', '.join(found.left)}")
    return ConvertedFile(text, notes)
