"""Which parameters each optimizer update changes: all of them, or blocks of them in turn, or some
entries of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .entries import EntryTurns
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
        """All of them."""
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
