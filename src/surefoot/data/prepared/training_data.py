"""The datasets of a run, encoded before the first step or while it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ..order.example_order import Order
from ..section import DataSection
from ..store.dataset import EncodedDataset


class TrainingData(Protocol):
    """What a run trains on, and what it is evaluated on."""

    @property
    def evals(self) -> Mapping[str, EncodedDataset]:
        """The evaluation sets by dataset; "" for what ``val_size`` holds out."""

    @property
    def complete(self) -> Sequence[EncodedDataset]:
        """The datasets that are encoded before the first step, and so may have outputs of a model
        precomputed for each of their examples; the training examples first, if they are."""

    @property
    def num_examples(self) -> int | None:
        """Training examples, if all of them are encoded."""

    def order(self, section: DataSection, *, seed: int) -> Order:
        """The training examples in the order of the run."""

    def changed(self, change: Callable[[EncodedDataset], EncodedDataset]) -> TrainingData:
        """The same with each dataset changed, which all must be ``complete`` for. Raises
        ``DataError`` if they are not."""
