"""BAdam's ratio mode (arXiv:2404.02827): full training, some entries of every matrix at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ..network.method import Method
from ..optim.blocks import ParameterNames, TrainedBlocks
from ..optim.entries import EntryTurns
from ..schema import must
from .layers import make_layers_trainable

if TYPE_CHECKING:
    from torch import nn


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
        own = frozenset(names.all) - frozenset(names.added)
        is_scattered = self.mask == "scatter"
        turns = EntryTurns(own, self.update_ratio, is_scattered, self.switch_interval, seed)
        return TrainedBlocks(frozenset(names.all), entries=turns)
