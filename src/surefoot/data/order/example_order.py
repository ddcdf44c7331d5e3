"""What a loader draws from: examples by number, and the order in which their numbers come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ...batch import Features
from ..data_order import Index

Description = Mapping[str, int | str | bool]


class EncodedExamples(Protocol):
    """Encoded examples by their numbers."""

    def __getitem__(self, item: int) -> Features:
        """The features of one example: views of the store, nothing is copied."""

    def lengths_of(self, items: Index) -> Index:
        """The tokens of each of ``items``, in the same shape."""


class Order(Protocol):
    """The order of the examples of each epoch: a pure function of (seed, epoch, position).

    A position counts the examples from 0 in each epoch.
    """

    @property
    def examples(self) -> EncodedExamples:
        """What the numbers refer to."""

    @property
    def shuffle(self) -> bool:
        """Whether it is another order than that of the data."""

    @property
    def is_complete(self) -> bool:
        """Whether all examples are encoded before the first step."""

    @property
    def num_examples(self) -> int | None:
        """Examples in an epoch, if all of them are encoded."""

    def indices(self, epoch: int, start: int, end: int) -> Index:
        """The examples at positions from ``start`` to ``end``, which are waited for; fewer, or
        none, where the epoch ends."""

    def reach(self, count: int) -> int:
        """Wait for ``count`` examples of an epoch, or for its end; how many are known."""

    def is_ready(self, epoch: int, last: int) -> bool:
        """Whether all examples up to the position ``last`` are there, so that nothing is waited
        for."""

    def describe(self, epoch: int, position: int) -> Description:
        """What the examples before a position are a function of, as a checkpoint contains it."""

    def describe_like(self, saved: Description) -> Description:
        """The same of this order, as far into the data as a description in a checkpoint goes."""
