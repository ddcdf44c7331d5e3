"""Full training of some weights at a time: BAdam (arXiv:2404.02827) by blocks of layers or by
entries of every matrix, LISA (arXiv:2403.17919) by a few random layers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from .. import model as models
from ..errors import RecipeError, counted
from ..network.method import Method
from ..optim.blocks import EntryTurns, ParameterNames, TrainedBlocks
from ..schema import must

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class BAdam(Method):
    """Tune the weights block by block: one decoder layer at a time, for some steps each. Gradients
    and optimizer state exist for that block only, and each block begins with a new state."""

    name: ClassVar[str] = "badam"

    order: Literal["ascending", "descending", "random", "fixed"] = "ascending"
    """The order of blocks. ``ascending`` begins with the layer next to the embeddings;
    ``descending`` with the one next to the output head; ``random`` draws a new permutation for each
    pass over all blocks, from ``train.seed``; ``fixed`` trains ``start_block`` only."""
    switch_interval: int = 50
    """Optimizer steps for which a block is trained before the next one."""
    start_block: int | None = None
    """The number of the first block, from 0. Unset: the first one of the order. Not for
    ``random``."""
    embeddings_and_head: bool = False
    """Whether the input embeddings and the output head, with the final norm, are blocks, too: the
    first one and the last one. If they share their matrix, they are one block, the first one. When
    false, they are never trained."""

    def __post_init__(self) -> None:
        must(self, "be at least 1", "switch_interval")
        must(self, "not be negative", "start_block")
        if self.order == "fixed" and self.start_block is None:
            raise ValueError("order is fixed, so start_block must say which block is trained")
        if self.order == "random" and self.start_block is not None:
            raise ValueError("order is random, so there is no start_block; leave it out")

    def apply(self, model: nn.Module) -> nn.Module:
        """Make the layers trainable, and with ``embeddings_and_head`` everything. Raises
        ``ModelError`` if the model has no layers."""
        return make_layers_trainable(model, with_rest=self.embeddings_and_head)

    def trainable(self, names: ParameterNames, seed: int) -> TrainedBlocks:
        """One block at a time. Raises ``RecipeError`` if ``start_block`` does not exist."""
        blocks = layer_blocks(names.layers)
        if self.embeddings_and_head:
            blocks = _with_ends(blocks, names)
        labels = list(blocks)
        if (self.start_block or 0) >= len(labels):
            raise RecipeError(
                f"method.badam.start_block: expected at most {len(labels) - 1}, as the model has "
                f"{counted(len(labels), 'block')}, got {self.start_block}"
            )
        # Heads of the stage (values, rewards) are in no layer, and learn at every step.
        always = frozenset(names.added)
        return TrainedBlocks(always, blocks, self.switch_interval, self._chosen(labels, seed))

    def _chosen(self, labels: Sequence[str], seed: int) -> Callable[[int], Sequence[str]]:
        """The block of each turn."""
        count, last = len(labels), len(labels) - 1
        if self.order == "random":
            return lambda turn: (labels[drawn(count, seed, turn // count)[turn % count]],)
        first = self.start_block
        if first is None:
            first = last if self.order == "descending" else 0
        towards = {"ascending": 1, "descending": -1, "fixed": 0}[self.order]
        return lambda turn: (labels[(first + towards * turn) % count],)


def _with_ends(
    blocks: Mapping[str, frozenset[str]], names: ParameterNames
) -> dict[str, frozenset[str]]:
    before, after = frozenset(names.before), frozenset(names.after)
    if names.is_tied:
        return {"embeddings and head": before | after, **blocks}
    ends = {"embeddings": before}, blocks, {"head": after}
    return {label: block for part in ends for label, block in part.items() if block}


@dataclass(frozen=True, kw_only=True)
class BAdamRatio(Method):
    """Tune some entries of every matrix at a time, others after some steps. Optimizer state, and
    what is kept of the gradient, exist for these entries only, and each turn begins with a new
    state. Norms and biases are trained at every step. For optimizers that treat every entry by
    itself."""

    name: ClassVar[str] = "badam_ratio"

    update_ratio: float = 0.05
    """The share of entries that is trained at once, in every row of a matrix."""
    mask: Literal["adjacent", "scatter"] = "adjacent"
    """Which entries of a row: ``adjacent`` ones, the same in every row, or ``scatter``: others in
    every row, drawn from ``train.seed``. Either way every entry is trained once in
    1/``update_ratio`` turns."""
    switch_interval: int = 100
    """Optimizer steps for which entries are trained before the next ones."""
    embeddings_and_head: bool = False
    """Whether the input embeddings, the final norm and the output head are trained, too."""

    def __post_init__(self) -> None:
        must(self, "be at least 1", "switch_interval")
        if not 0 < self.update_ratio <= 1:
            raise ValueError(f"update_ratio must be above 0 and at most 1, got {self.update_ratio}")

    def apply(self, model: nn.Module) -> nn.Module:
        """Make the layers trainable, and with ``embeddings_and_head`` everything. Raises
        ``ModelError`` if the model has no layers."""
        return make_layers_trainable(model, with_rest=self.embeddings_and_head)

    def trainable(self, names: ParameterNames, seed: int) -> TrainedBlocks:
        """All parameters, but some entries of each at a time; heads of the stage as a whole."""
        model_names = frozenset(names.all) - frozenset(names.added)
        is_scattered = self.mask == "scatter"
        turns = EntryTurns(model_names, self.update_ratio, is_scattered, self.switch_interval, seed)
        # Not the range over the flattened matrix of the paper's code: sharded by rows, most ranks
        # would then have nothing to train (docs/decisions/0046).
        return TrainedBlocks(frozenset(names.all), entries=turns)


@dataclass(frozen=True, kw_only=True)
class LISA(Method):
    """Tune the embeddings and the output head at every step, and beside them a few decoder layers,
    which are drawn again after some steps. Gradients and optimizer state exist for these only."""

    name: ClassVar[str] = "lisa"

    num_layers: int = 2
    """Layers that are trained at once."""
    switch_interval: int = 20
    """Optimizer steps after which other layers are drawn, from ``train.seed``."""

    def __post_init__(self) -> None:
        must(self, "be at least 1", "switch_interval")
        must(self, "be at least 1", "num_layers")

    def apply(self, model: nn.Module) -> nn.Module:
        """Make everything trainable. Raises ``ModelError`` if the model has no layers."""
        return make_layers_trainable(model, with_rest=True)

    def trainable(self, names: ParameterNames, seed: int) -> TrainedBlocks:
        """All but the layers, and some of these. Raises ``RecipeError`` if there are fewer."""
        blocks = layer_blocks(names.layers)
        labels, count = list(blocks), self.num_layers
        if count > len(labels):
            raise RecipeError(
                f"method.lisa.num_layers: expected at most {len(labels)}, the layers of the "
                f"model, got {count}"
            )
        always = frozenset((*names.before, *names.after, *names.added))

        def chosen(turn: int) -> Sequence[str]:
            return [labels[i] for i in sorted(drawn(len(labels), seed, turn)[:count])]

        return TrainedBlocks(always, blocks, self.switch_interval, chosen)


def make_layers_trainable(model: nn.Module, *, with_rest: bool) -> nn.Module:
    """What these methods share: make the decoder layers trainable, and the rest of ``model`` or
    not. Raises ``ModelError`` if there are no layers."""
    layers = models.weight_matrices.decoder_layers(model)
    model.requires_grad_(with_rest)
    for layer in layers:
        layer.requires_grad_(True)
    return model


def layer_blocks(layers: Iterable[Sequence[str]]) -> dict[str, frozenset[str]]:
    """The parameters of each layer that has some, by its label."""
    numbered = enumerate(layers)
    return {f"layer {number}": frozenset(names) for number, names in numbered if names}


def drawn(count: int, seed: int, number: int) -> Sequence[int]:
    """Permutation ``number`` of the numbers below ``count``, by the hash of each: it depends on no
    library's version."""

    # A permutation of numpy or torch may be another one in their next version, and a resumed run
    # would train another block.
    def key(place: int) -> bytes:
        return hashlib.blake2b(f"{seed} {number} {place}".encode()).digest()

    return sorted(range(count), key=key)
