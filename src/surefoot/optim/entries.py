"""Which entries of each matrix an optimizer update changes, if not all: some columns of every row.

Every row has the same number of them, and another turn has others. So a matrix that is sharded
along its rows has the same trained entries on any number of ranks, and their state is sharded as
the matrix is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import RecipeError
from ..parallel.sharding import AxisShard
from .optimizer import Optimizer
from .state_tensor import Shape

ENTRIES = "entries"  # the key of a turn's identity in the state of a matrix


@dataclass(frozen=True)
class EntryTurns:
    """The entries that are trained at once, by turns of ``interval`` steps."""

    names: frozenset[str]  # of the parameters to which this applies
    ratio: float  # of the entries of a row
    is_scattered: bool  # whether they are drawn, from ``seed``; else they are adjacent
    interval: int
    seed: int

    def turn(self, step: int) -> int:
        """The turn of update number ``step`` (from 0)."""
        return step // self.interval

    def shape(self, name: str, whole: Shape) -> Shape:
        """The shape of the entries that are trained at once; vectors are trained as a whole."""
        if name not in self.names or len(whole) < 2:
            return whole
        return (*whole[:-1], max(1, round(self.ratio * whole[-1])))

    def identity(self, turn: int) -> int:
        """A number that is another one if other entries are trained in ``turn``."""
        drawn = self.seed if self.is_scattered else None
        text = f"{self.ratio} {self.interval} {drawn} {turn}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def check_entries(
    entries: EntryTurns | None,
    optim: Optimizer,
    shapes: Mapping[str, Shape],
    cuts: Mapping[str, tuple[AxisShard, ...]],
) -> None:
    """Raise ``RecipeError`` if ``optim`` computes with whole matrices, or a mesh shards rows of
    which some entries are trained. ``shapes`` are those of the parameters, ``cuts`` their
    shards."""
    if entries is None:
        return
    if not optim.is_entrywise:
        raise RecipeError(
            f"optim: {type(optim).__name__} updates matrices as a whole, but the method trains "
            "some entries of each at a time; use adamw, adamw_bf16, lion or ademamix"
        )
    for name, shape in shapes.items():
        if entries.shape(name, shape) == shape:
            continue
        for cut in cuts.get(name, ()):
            if cut.dim == len(shape) - 1:
                raise RecipeError(
                    f"parallel.{cut.axis}: the method trains some entries of each row, but rows of "
                    f"{name} are sharded; set parallel.{cut.axis} to 1 and use parallel.dp_shard, "
                    "or use method: badam"
                )
