"""LISA (arXiv:2403.17919): full training of a few random layers at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..errors import RecipeError
from ..network.method import Method
from ..optim.blocks import ParameterNames, TrainedBlocks
from ..schema import must
from .layers import drawn, layer_blocks, make_layers_trainable

if TYPE_CHECKING:
    from torch import nn


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
