"""Encoded items as flat arrays with offsets, read in place: an item becomes a Python object only
when it is used.

An ``EncodedStore`` contains the items of one dataset; an ``EncodedDataset`` is a selection of items
of one store or several.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...batch import Features
from ..data_order import Index
from .cache import FLOATS, Array, EncodedStore, Ragged


@dataclass(frozen=True)
class EncodedDataset:
    """Items of some stores, in a fixed order; what a Loader reads from."""

    stores: tuple[EncodedStore, ...]
    index: Index  # [items] positions in the stores laid end to end

    def __len__(self) -> int:
        return len(self.index)

    @property
    def length(self) -> int:
        """The number of items, as an ``ExampleStream`` gives it."""
        return len(self)

    def reach(self, _count: int) -> int:
        """How many items are known: all of them."""
        return len(self)

    def has(self, _count: int) -> bool:
        """True: there is nothing to wait for."""
        return True

    def probes(self) -> NDArray[np.uint64]:
        """[items] a hash of the length of each item and 16 of its tokens: the same for the same
        item in any dataset, and quick to compute for millions."""
        return np.concatenate([store.probes() for store in self.stores])[self.index]

    def tokens_of(self, item: int) -> bytes:
        """The tokens of an item, to compare."""
        return np.asarray(self[item]["input_ids"], np.int32).tobytes()

    def __getitem__(self, item: int) -> Features:
        """The features of one item, int32."""
        at = int(self.index[item])
        store = bisect_right(self._starts, at) - 1
        return self.stores[store][at - self._starts[store]]

    def origin(self, item: int) -> tuple[int, int]:
        """The store of an item, and the row of the dataset that it comes from."""
        at = int(self.index[item])
        store = bisect_right(self._starts, at) - 1
        return store, int(self.stores[store].rows[at - self._starts[store]])

    @cached_property
    def lengths(self) -> Index:
        """[items] tokens of each item."""
        return np.concatenate([store.lengths for store in self.stores])[self.index]

    def lengths_of(self, items: Index) -> Index:
        """The tokens of each of ``items``, in the same shape."""
        return self.lengths[items]

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal items in equal order."""
        digest = xxhash.xxh3_128(" ".join(store.content for store in self.stores).encode())
        digest.update(np.ascontiguousarray(self.index).data)
        return digest.hexdigest()

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *np.cumsum([len(store) for store in self.stores]).tolist()]


def num_tokens(features: Features) -> int:
    """Tokens of one item, all its ``input_ids`` (or ``..._input_ids``) together."""
    return sum(len(ids) for name, ids in features.items() if name.endswith("input_ids"))


def join(stores: Sequence[EncodedStore]) -> EncodedDataset:
    """All items of the stores, one store after another."""
    return EncodedDataset(tuple(stores), np.arange(sum(len(store) for store in stores)))


def in_memory(items: Sequence[Features]) -> EncodedDataset:
    """A dataset of items in memory."""
    features, digest = {}, xxhash.xxh3_128()
    for name in items[0] if items else ():
        lists = [item[name] for item in items]
        offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        flat = _flat(lists)
        features[name] = Ragged(flat, offsets)
        digest.update(name.encode() + flat.tobytes() + offsets.tobytes())
    return join([EncodedStore(features, np.arange(len(items)), digest.hexdigest())])


def _flat(lists: Sequence[Sequence[int]]) -> Array:
    """All lists end to end. Bytes stay bytes and floats keep their type; the rest are tokens."""
    if isinstance(lists[0], bytes):
        return np.frombuffer(b"".join(map(bytes, lists)), np.uint8)
    kind = next((np.asarray(each[:1]).dtype for each in lists if len(each)), np.int32)
    dtype = kind if kind in FLOATS else np.int32
    return np.concatenate([np.asarray(each, dtype) for each in lists])
