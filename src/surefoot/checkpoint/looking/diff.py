"""Compare two checkpoints of any layout part by part: tensors (one by one, in bounded memory),
states, settings, recipe and versions.

Statistics of tensors are computed in 64-bit arithmetic and one block of memory, whatever their
size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ...errors import CheckpointError
from ...parallel.sharding import Box
from ...storage import files
from ..disk import strict_json
from ..disk.folder import FolderWeights, TensorLocation, open_checkpoint
from ..disk.manifest import STATE
from ..layouts.detection import has_manifest, open_contents, plain, small_file, states_of
from ..layouts.layout import AS_STORED, Reading
from ..sources import FolderSource, TensorSource
from ..state.roles import FileRole, role_of
from .summary import PARTS, ValueChange, differences

Verdict = Literal["equal", "differs", "only in A", "only in B", "other type", "other shape"]
Progress = Callable[[int], None]  # is told the bytes of every tensor that has been compared
CONFIGS = ("config.json", "adapter_config.json", "generation_config.json")


@dataclass(frozen=True)
class TensorDifference:
    """The difference of two tensors of one shape.

    ``max_absolute`` is infinite where one value is finite and the other is not; the norms are over
    the positions where both are finite.
    """

    num_different: int  # values that are not the same number; nan is nan, -0.0 is 0.0
    max_absolute: float  # largest |B - A|
    norm: float  # of B - A
    norm_a: float
    norm_b: float

    @property
    def relative(self) -> float:
        """The norm of B - A as a share of the larger of both norms: 0 to 2."""
        larger = max(self.norm_a, self.norm_b)
        return self.norm / larger if larger else 0.0


@dataclass(frozen=True)
class TensorChange:
    """One tensor in both checkpoints. ``figures`` is set if the values could be compared."""

    name: str  # role/name
    verdict: Verdict
    types: tuple[str | None, str | None]
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    figures: TensorDifference | None = None

    @property
    def role(self) -> str:
        """What kind of tensor it is: model, optimizer, state, or that of another network."""
        return role_of(self.name)


def compare_tensors(
    a: Path,
    b: Path,
    roles: Collection[str] | None = None,
    progress: Progress | None = None,
    reading: Reading = AS_STORED,
) -> Iterator[TensorChange]:
    """Every tensor of both folders, those of ``a`` first; with equal hashes it is not read."""
    weights_a, weights_b = (open_contents(folder, roles, reading) for folder in (a, b))
    sources = FolderSource(weights_a), FolderSource(weights_b)
    with files.raising(CheckpointError):
        for name in dict.fromkeys((*weights_a.tensors, *weights_b.tensors)):
            yield _compare(name, weights_a.tensors.get(name), weights_b.tensors.get(name), sources)
            if progress is not None:
                progress(num_bytes(name, weights_a, weights_b))


def num_bytes(name: str, *contents: FolderWeights) -> int:
    """The length of a tensor in all ``contents`` that have it."""
    places = (weights.tensors.get(name) for weights in contents)
    return sum(place.entry.num_bytes for place in places if place is not None)


def _compare(
    name: str,
    a: TensorLocation | None,
    b: TensorLocation | None,
    sources: tuple[FolderSource, FolderSource],
) -> TensorChange:
    types = a.entry.dtype if a else None, b.entry.dtype if b else None
    shapes = a.entry.shape if a else None, b.entry.shape if b else None
    if a is None or b is None:
        return TensorChange(name, "only in B" if a is None else "only in A", types, shapes)
    if shapes[0] != shapes[1]:
        return TensorChange(name, "other shape", types, shapes)
    if types[0] == types[1] and a.hash is not None and a.hash == b.hash:
        return TensorChange(name, "equal", types, shapes)
    if types[0] != types[1] and "C64" in types:
        return TensorChange(name, "other type", types, shapes)
    if types[0] == types[1] and _are_equal(name, sources):
        return TensorChange(name, "equal", types, shapes)
    verdict: Verdict = "differs" if types[0] == types[1] else "other type"
    return TensorChange(name, verdict, types, shapes, _measure(name, sources))


def _are_equal(name: str, sources: tuple[FolderSource, FolderSource]) -> bool:
    """Whether the bytes are the same; of tensors that differ, little more than a block is read."""
    a, b = sources
    return all(
        _same_bytes(a.read(name, box), b.read(name, box)) for box in blocks(a.shapes()[name])
    )


def _measure(name: str, sources: tuple[FolderSource, FolderSource]) -> TensorDifference:
    total = TensorDifference(0, 0.0, 0.0, 0.0, 0.0)
    for box in blocks(sources[0].shapes()[name]):
        part = _figures(*(in_double(source.read(name, box)) for source in sources))
        total = TensorDifference(
            total.num_different + part.num_different,
            max(total.max_absolute, part.max_absolute),
            math.hypot(total.norm, part.norm),
            math.hypot(total.norm_a, part.norm_a),
            math.hypot(total.norm_b, part.norm_b),
        )
    return total


def _figures(a: torch.Tensor, b: torch.Tensor) -> TensorDifference:
    num_odd = 0
    if not (are_finite(a) and are_finite(b)):
        both = a.isfinite() & b.isfinite()
        num_odd = int((~both & (a != b) & ~(a.isnan() & b.isnan())).sum())
        a, b = a[both], b[both]
    apart = b - a
    largest = float(apart.abs().max()) if apart.numel() else 0.0
    return TensorDifference(
        num_odd + int(apart.count_nonzero()),
        math.inf if num_odd else largest,
        norm(apart),
        norm(a),
        norm(b),
    )


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in (a, b)]
    if len(flat[0]) % 8 == 0:
        flat = [tensor.view(torch.int64) for tensor in flat]  # several times as quick
    return torch.equal(*flat)


def compare_values(a: Path, b: Path) -> Mapping[str, list[ValueChange]]:
    """States (if stored in the same way), library versions and configurations, by role."""
    with files.raising(CheckpointError):
        are_surefoots = [has_manifest(folder) for folder in (a, b)]
        changes = {"config": differences(_configs(a), _configs(b))}
        if are_surefoots[0] == are_surefoots[1]:
            states_a, states_b = (_states(folder) for folder in (a, b))
            names = dict.fromkeys((*states_a, *states_b))
            optimizers = [name for name in names if FileRole(name).is_optimizer]
            changes["optimizer"] = [
                change
                for name in optimizers
                for change in differences(states_a.pop(name, {}), states_b.pop(name, {}), name)
            ]
            changes["state"] = differences(states_a, states_b)
        if all(are_surefoots):
            changes["versions"] = differences(_versions(a), _versions(b))
    return changes


def _states(folder: Path) -> dict[str, Any]:
    states = plain(dict(states_of(folder)))
    if not isinstance(states, dict):
        raise CheckpointError(
            f"{folder / STATE}: expected a state by its name, found a {type(states).__name__}"
        )
    return states


def _versions(folder: Path) -> dict[str, str]:
    return dict(open_checkpoint(folder).manifest.versions)


def _configs(folder: Path) -> dict[str, object]:
    texts = {name: small_file(folder, name) for name in CONFIGS}
    return {
        name: strict_json.parse_object(text, str(folder / name))
        for name, text in texts.items()
        if text is not None
    }


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
    reading: Reading = AS_STORED,
) -> Comparison:
    """What differs in ``parts`` of the checkpoints ``a`` and ``b``, folders of any layout.

    ``parse`` turns the text of a recipe, and its name in errors, into plain data. ``progress``,
    given a title and a number of bytes, returns what is called with those that were read.
    """
    contents = [open_contents(folder, parts, reading) for folder in (a, b)]
    names = contents[0].tensors.keys() | contents[1].tensors.keys()
    with progress("comparing", sum(num_bytes(name, *contents) for name in names)) as advance:
        tensors = list(compare_tensors(a, b, parts, advance, reading))
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


BLOCK = 1 << 18  # elements; 2 MB in 64 bits, so that they stay in the cache


@dataclass(frozen=True)
class Norms:
    """Statistics over the finite values (or their real and imaginary parts); None without any."""

    l2: float
    minimum: float | None
    maximum: float | None
    mean: float | None
    num_nan: int
    num_inf: int


def norms(source: TensorSource, name: str) -> Norms:
    """The statistics of one tensor, read block by block."""
    l2, total, count, num_nan, num_inf = 0.0, 0.0, 0, 0, 0
    low, high = math.inf, -math.inf
    for box in blocks(source.shapes()[name]):
        values = in_double(source.read(name, box))
        if not are_finite(values):
            num_nan += int(values.isnan().sum())
            num_inf += int(values.isinf().sum())
            values = values[values.isfinite()]
        if values.numel():
            first, last = map(float, values.aminmax())
            low, high = min(low, first), max(high, last)
            l2 = math.hypot(l2, norm(values))
            total += float(values.sum())
            count += values.numel()
    if not count:
        return Norms(0.0, None, None, None, num_nan, num_inf)
    return Norms(l2, low, high, total / count, num_nan, num_inf)


def blocks(shape: tuple[int, ...]) -> Iterator[Box]:
    """The boxes in which to read a tensor of ``shape``, one after another."""
    return Box.whole(shape).blocks(BLOCK)


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    """All values in one dimension and 64 bits."""
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return parts.reshape(-1).to(torch.float64)


def are_finite(values: torch.Tensor) -> bool:
    """Whether no value is nan or infinite; much faster than a test of each value."""
    return not values.numel() or all(math.isfinite(end) for end in values.aminmax())


def norm(values: torch.Tensor) -> float:
    """L2 norm of 64-bit values, without overflow or underflow of the squares."""
    largest = max(abs(float(end)) for end in values.aminmax()) if values.numel() else 0.0
    if largest == 0 or math.isinf(largest):  # a difference may overflow
        return largest
    # Then neither the squares nor their sum leave the range of float64, 1e-308 to 1e308.
    if 1e-140 < largest < 1e140:
        return math.sqrt(float(values.dot(values)))
    return largest * math.sqrt(float((values / largest).square().sum()))
