"""BAdam (arXiv:2404.02827): full training with the optimizer state of one block of layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ..errors import RecipeError, counted
from ..network.method import Method
from ..optim.blocks import ParameterNames, TrainedBlocks
from ..schema import must
from .layers import drawn, layer_blocks, make_layers_trainable

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
    return {label: found for each in ends for label, found in each.items() if found}
