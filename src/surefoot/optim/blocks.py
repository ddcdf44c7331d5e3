"""Which parameters each optimizer update changes: all of them, blocks of them in turn, or some
columns of each of their rows.

Every row has the same number of trained entries, and another turn has others. So a matrix that is
sharded along its rows has the same trained entries on any number of ranks, and their state is
sharded as the matrix is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import RecipeError
from ..parallel.sharding import AxisShard
from .optimizer import Optimizer
from .state_tensor import Shape

LONG = 10_000  # steps of a run whose length is not known: all blocks have had their turn
Chosen = Callable[[int], Sequence[str]]  # the blocks of turn number ..., by label


@dataclass(frozen=True)
class ParameterNames:
    """The parameters that may be trained, by their names in files, in the order of the model."""

    before: tuple[str, ...] = ()  # the decoder layers: embeddings
    layers: tuple[tuple[str, ...], ...] = ()  # of each decoder layer; may be empty
    after: tuple[str, ...] = ()  # them: final norm, and output head unless it is tied
    added: tuple[str, ...] = ()  # heads that the stage has added
    is_tied: bool = False  # the output head is the matrix of the input embeddings

    @property
    def all(self) -> tuple[str, ...]:
        """All names, in the order of the model; the added ones last."""
        inside = (name for layer in self.layers for name in layer)
        return (*self.before, *inside, *self.after, *self.added)


@dataclass(frozen=True)
class TrainedBlocks:
    """Parameters that every update changes, and blocks of parameters that are trained in turn."""

    always: frozenset[str]
    blocks: Mapping[str, frozenset[str]] = field(default_factory=dict)  # by label
    interval: int = 1  # steps of a turn
    chosen: Chosen = lambda _turn: ()
    entries: EntryTurns | None = None  # None: all entries of what is trained

    @property
    def switch(self) -> bool:
        """Whether there are blocks."""
        return bool(self.blocks)

    @property
    def changes(self) -> bool:
        """Whether later steps train other parameters, or other entries of them."""
        return self.switch or self.entries is not None

    @property
    def in_turn(self) -> frozenset[str]:
        """The parameters of which some entries or all are changed by some updates only."""
        partly = frozenset[str]() if self.entries is None else self.entries.names
        return partly | (frozenset[str]().union(*self.blocks.values()) - self.always)

    def labels(self, step: int) -> Sequence[str]:
        """The blocks that update number ``step`` (from 0) changes."""
        return self.chosen(step // self.interval) if self.blocks else ()

    def trainable(self, step: int, names: Sequence[str] = ()) -> frozenset[str]:
        """The parameters that update number ``step`` changes, of whichever ``names`` there are."""
        return self.always.union(*(self.blocks[label] for label in self.labels(step)))

    def shape_at_once(self, name: str, whole: Shape) -> Shape:
        """The shape of what an update changes of the parameter ``name`` of the shape ``whole``."""
        return whole if self.entries is None else self.entries.shape(name, whole)

    def turns(self, steps: int = LONG) -> list[frozenset[str]]:
        """Each set of parameters that is trained at once in the first ``steps``, in order."""
        starts = range(0, max(1, steps), self.interval) if self.blocks else (0,)
        return list(dict.fromkeys(self.trainable(step) for step in starts))


def everything(names: ParameterNames) -> TrainedBlocks:
    """All parameters, at every step."""
    return TrainedBlocks(frozenset(names.all))


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
        # 63 bits: it is saved as a tensor of int64, which has a sign.
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
