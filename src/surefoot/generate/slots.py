"""Keys and values of the rows of a batch, each in a slot of its own, from column 0 on.

No row is padded on the left: a row of n tokens is in columns 0 to n - 1 of its slot, and a mask
says which columns it sees. A slot whose row has ended is taken by the next one.

Columns are read in multiples of 16, and rows are computed in multiples of 4. On some CPUs in
float32, the fused attention then gives a row the same bits whatever the others' lengths are, and a
matrix product does whatever the number of rows and of threads. (Threads divide the rows of a
product: of 5 rows, one of two threads has 2, and rounds differently from one with 4.) ``proof.py``
tries whether it is so.

Shapes: S slots, B rows, H heads of keys, C columns, E size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

COLUMNS = 16
ROWS = 4


def rounded(count: int, unit: int = COLUMNS) -> int:
    """The next multiple of ``unit``."""
    return -(-count // unit) * unit


@dataclass
class StepColumns:
    """Where the tokens of one step are written, and what is read."""

    num_slots: int
    capacity: int  # columns that a slot has
    bound: int  # columns that a slot will ever need
    rows: torch.Tensor | None = None  # [B] the slots, 0 to B - 1
    columns: torch.Tensor | None = None  # [B]
    length: int = 0  # columns that are read

    def set(self, positions: Sequence[int], device: torch.device) -> None:
        """Those of tokens at ``positions`` of the first slots."""
        if self.rows is None or len(self.rows) != len(positions):
            self.rows = torch.arange(len(positions), device=device)
        self.columns = torch.tensor(positions, device=device)
        self.length = rounded(max(positions) + 1)
        if self.length > self.capacity:
            grown = max(self.length, rounded(self.capacity * 3 // 2))
            self.capacity = max(self.length, min(grown, self.bound))


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer: [S, H, C, E] each."""

    is_sliding = False

    def __init__(self, step: StepColumns) -> None:
        super().__init__()
        self._step = step

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Zeros: what a mask hides must be a number."""
        self.keys, self.values = (self._blank(like) for like in (key_states, value_states))
        self.is_initialized = True

    def _blank(self, like: torch.Tensor) -> torch.Tensor:
        step = self._step
        slots = rounded(step.num_slots, ROWS)
        return like.new_zeros(slots, like.shape[-3], step.capacity, like.shape[-1])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token of each row; what the rows may read, [B, H, C, E]. Rows beyond those of
        ``step`` fill the batch up to a multiple of ``ROWS``: they read whatever is in slots."""
        self._reserve(key_states, value_states)
        step = self._step
        assert step.rows is not None
        count, filled = len(step.rows), key_states.shape[0]
        found = []
        for held, new in ((self.keys, key_states), (self.values, value_states)):
            held[step.rows, :, step.columns] = new[:count, :, 0]
            found.append(held[:filled, :, : step.length])
        return found[0], found[1]

    def _reserve(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Memory for all slots, and as many columns as a slot is to have."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots, _, columns, _ = self.keys.shape
        if slots < rounded(self._step.num_slots, ROWS) or columns < self._step.capacity:
            for name in ("keys", "values"):
                old = getattr(self, name)
                setattr(self, name, self._blank(old))
                getattr(self, name)[:slots, :, :columns] = old

    def put(self, slot: int, key_HTE: torch.Tensor, value_HTE: torch.Tensor) -> None:
        """Fill the first columns of a slot."""
        self._reserve(key_HTE, value_HTE)
        self.keys[slot, :, : key_HTE.shape[1]] = key_HTE
        self.values[slot, :, : value_HTE.shape[1]] = value_HTE

    def move(self, source: int, target: int, count: int) -> None:
        """Copy the first columns of a slot to another one."""
        for held in (self.keys, self.values):
            held[target, :, :count] = held[source, :, :count]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As many columns as are read."""
        return self._step.length, 0

    def get_seq_length(self) -> int:
        """Columns before those of this step."""
        return self._step.length - 1

    def get_max_length(self) -> int:
        """They grow."""
        return -1


class SlotCache(Cache):  # type: ignore[misc]
    """The slots of all layers."""

    def __init__(self, num_slots: int, capacity: int, bound: int) -> None:
        self.step = StepColumns(num_slots, rounded(capacity), rounded(bound))
        super().__init__(layer_class_to_replicate=self._layer)

    def _layer(self) -> SlotLayer:
        return SlotLayer(self.step)

    def grow(self, num_slots: int, length: int) -> None:
        """Have at least so many slots, each with room for ``length`` tokens."""
        self.step.num_slots = max(self.step.num_slots, num_slots)
        self.step.capacity = max(self.step.capacity, rounded(length))

    def put(self, slot: int, prefix: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Fill the first columns of a slot in all layers; there is no layer for no columns."""
        while len(self.layers) < len(prefix):
            self.layers.append(self._layer())
        for index, (key_HTE, value_HTE) in enumerate(prefix):
            self.layers[index].put(slot, key_HTE, value_HTE)

    def move(self, source: int, target: int, count: int) -> None:
        """Copy the first columns of a slot to another one in all layers."""
        for layer in self.layers:
            layer.move(source, target, count)
