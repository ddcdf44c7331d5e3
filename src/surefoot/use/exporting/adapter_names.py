"""Adapters whose experts have a matrix each, under the names of the base's files, as servers read
them: ``...mlp.experts.7.gate_proj.lora_A.weight``.

PEFT adapts the experts of a layer as one parameter. The factors of all experts are one tensor: the
rows of A by expert, then rank; the columns of B by rank, then expert. Matrices that are one
parameter in memory (gate and up) have one A, which each gets, and each its rows of B. So nothing is
computed: the products are those of training, bit for bit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ...checkpoint.layouts.adapter_merge import PREFIX, Updated
from ...checkpoint.sources import Shape, TensorSource, once
from ...errors import CheckpointError
from ...parallel.sharding import Box

_MOST_READ = 4  # fused tensors in memory: A and B of two parameters, whose names take turns
_PATTERNS = ("rank_pattern", "alpha_pattern")


@dataclass(frozen=True)
class _Part:
    """The position of one expert's factor."""

    name: str  # of that of all experts
    expert: int
    num_experts: int
    shape: tuple[int, int]
    first_row: int | None = None  # of B; None: it is an A


@dataclass(frozen=True)
class SingleExperts:
    """The tensors of an adapter, those of fused experts one by one."""

    source: TensorSource
    whole: frozenset[str]  # what stays as it is
    parts: Mapping[str, _Part]
    _read: OrderedDict[str, torch.Tensor] = field(
        default_factory=OrderedDict, repr=False, compare=False
    )

    @once
    def shapes(self) -> Mapping[str, Shape]:
        """Of single experts: A [R, I], B [O, R]."""
        shapes = self.source.shapes()
        whole = {name: shapes[name] for name in shapes if name in self.whole}
        return whole | {name: part.shape for name, part in self.parts.items()}

    @once
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Unchanged."""
        dtypes = self.source.dtypes()
        whole = {name: dtypes[name] for name in dtypes if name in self.whole}
        return whole | {name: dtypes[part.name] for name, part in self.parts.items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A box of a factor."""
        part = self.parts.get(name)
        if part is None:
            return self.source.read(name, box)
        factor, (height, width) = self._fused(part.name), part.shape
        if part.first_row is None:
            matrix = factor[part.expert * height :][:height]
        else:
            matrix = factor[part.first_row :][:height, part.expert :: part.num_experts]
        assert matrix.shape == (height, width)
        return matrix[tuple(map(slice, box.start, box.stop))].contiguous()

    def _fused(self, name: str) -> torch.Tensor:
        if name not in self._read:
            self._read[name] = self.source.read(name, Box.whole(self.source.shapes()[name]))
            if len(self._read) > _MOST_READ:
                self._read.popitem(last=False)
        return self._read[name]


def single_experts(
    source: TensorSource,
    settings: Mapping[str, object],
    updated: Mapping[str, Updated],
    base: Mapping[str, Shape],
) -> tuple[SingleExperts, dict[str, object]]:
    """The adapter in ``source``, with a matrix for each expert, and its ``settings`` for that;
    ``updated`` are the tensors that each module changes, ``base`` the shapes in the base's files.
    Raises ``CheckpointError`` if it has no such experts, or their factors do not say their scale by
    themselves."""
    shapes, parts, fused, leaves = source.shapes(), dict[str, _Part](), set[str](), set[str]()
    for module, of_module in updated.items():
        slices = {name: at for name, at in of_module.tensors.items() if at is not None}
        if not slices or any(len(base[name]) != 2 for name in slices):
            continue  # experts that are one tensor in the base's files, too
        a, b = (f"{PREFIX}{module}.lora_{half}.weight" for half in "AB")
        fused |= {a, b}
        for name, at in slices.items():
            place = name.removesuffix(".weight")
            expert, first_row, _ = at.start
            rank = shapes[a][0] // at.num_experts
            low, high = (rank, shapes[a][1]), (base[name][0], rank)
            for half, part in (
                ("A", _Part(a, expert, at.num_experts, low)),
                ("B", _Part(b, expert, at.num_experts, high, first_row)),
            ):
                parts[f"{PREFIX}{place}.lora_{half}.weight"] = part
            leaves.add(place.rpartition(".")[2])
    if not parts:
        raise CheckpointError(
            "--experts single: the adapter has no experts that are single matrices in the files of "
            "its base; leave the option out"
        )
    if patterns := [name for name in _PATTERNS if settings.get(name)]:
        raise CheckpointError(
            f"--experts single: the adapter has {' and '.join(patterns)}, which servers do not "
            "read; merge it with `surefoot export`"
        )
    targets, parameters = settings.get("target_modules"), settings.get("target_parameters")
    targets = [] if targets is None else targets
    if not isinstance(targets, list) or not isinstance(parameters, list):
        raise CheckpointError(
            "--experts single: target_modules of adapter_config.json is no list; name the modules"
        )
    remaining = [name for name in parameters if name.endswith(".weight")]  # of linear layers
    changed = {
        "target_modules": sorted({*targets, *leaves}),
        "target_parameters": remaining or None,
    }
    return SingleExperts(source, frozenset(shapes.keys() - fused), parts), {**settings, **changed}
