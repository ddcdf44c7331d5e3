"""Two checkpoints compared part by part: tensors, states, settings, recipe and versions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ..reading.contents import open_contents, small_file
from .diff import TensorChange, compare_tensors, compare_values, num_bytes
from .values import PARTS, ValueChange, differences

RECIPE = "recipe.yaml"


@dataclass(frozen=True)
class Comparison:
    """The results of all comparisons."""

    tensors: Sequence[TensorChange]
    values: dict[str, list[ValueChange]]  # part -> what differs

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        changed = any(tensor.verdict != "equal" for tensor in self.tensors)
        return not changed and not any(self.values.values())


def compare(
    a: Path,
    b: Path,
    *,
    parts: Collection[str] = PARTS,
    parse: Callable[[str, str], object],
    progress: Callable[[str, int], AbstractContextManager[Callable[[int], None]]],
) -> Comparison:
    """What differs in ``parts`` of the checkpoints ``a`` and ``b``, folders of any layout.

    ``parse`` turns the text of a recipe, and its name in errors, into plain data. ``progress``,
    given a title and a number of bytes, returns what is called with those that were read.
    """
    contents = open_contents(a, parts), open_contents(b, parts)
    names = contents[0].tensors.keys() | contents[1].tensors.keys()
    with progress("comparing", sum(num_bytes(name, *contents) for name in names)) as advance:
        tensors = list(compare_tensors(a, b, parts, advance))
    values = dict(compare_values(a, b))
    recipes = _recipe(a, parse), _recipe(b, parse)
    if None not in recipes:
        values["recipe"] = differences(*recipes)
    return Comparison(
        tensors, {part: values[part] for part in PARTS if part in {*parts} & {*values}}
    )


def _recipe(folder: Path, parse: Callable[[str, str], object]) -> object:
    """The recipe of a checkpoint as plain data; None if it has none."""
    text = small_file(folder, RECIPE)
    return None if text is None else parse(text.decode(errors="replace"), str(folder / RECIPE))
