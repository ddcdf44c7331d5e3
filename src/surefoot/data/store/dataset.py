"""Encoded items as flat arrays with offsets, read in place: an item becomes a Python object only
when it is used.

An ``EncodedStore`` contains the items of one dataset; an ``EncodedDataset`` is a selection of items
of one store or several.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...batch import Features
from ..data_order import Index
from .checked_file import CheckedFile

# Tokens and lengths; bytes, such as the JSON that a reward reads; precomputed outputs of a model.
Array = NDArray[np.int32] | NDArray[np.uint8] | NDArray[np.float32] | NDArray[np.float64]
Flat = Array | CheckedFile  # in memory, or in the cache
_PROBES, _FACTOR = 16, np.uint64(0x9E3779B97F4A7C15)  # of 2^64, the golden ratio
FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


class Ragged(NamedTuple):
    """Concatenated lists of numbers: list i is ``flat[offsets[i]:offsets[i + 1]]``."""

    flat: Flat
    offsets: Index  # [lists + 1]


@dataclass(frozen=True)
class EncodedStore:
    """The items of one dataset, by feature."""

    features: Mapping[str, Ragged]
    rows: Index  # [items] the row of the dataset that each item comes from
    content: str  # hash of all of it

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Features:
        return {
            name: flat[offsets[index] : offsets[index + 1]]  # type: ignore[misc]
            for name, (flat, offsets) in self.features.items()
        }

    @property
    def lengths(self) -> Index:
        """[items] tokens of each item, all its ``input_ids`` (or ``..._input_ids``) together."""
        total = np.zeros(len(self), np.int64)
        for name, ragged in self.features.items():
            if name.endswith("input_ids"):
                total += np.diff(ragged.offsets)
        return total

    def probes(self) -> NDArray[np.uint64]:
        """See ``EncodedDataset.probes``."""
        flat, offsets = self.features["input_ids"]
        lengths, tokens = np.diff(offsets), flat[:]
        found = lengths.astype(np.uint64)
        for part in range(_PROBES):
            places = offsets[:-1] + (lengths - 1) * part // (_PROBES - 1)
            found = found * _FACTOR + tokens[places].astype(np.uint64)
        return found


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
