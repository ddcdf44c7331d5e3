"""Encoded items, read in place: an item becomes a Python object only when it is used.

An ``EncodedDataset`` is a selection of items of one store or several. An ``ExampleStream`` is read
while it is still being encoded: its items are numbered in order, those of the first dataset's rows,
then those of the next. An item depends on the data alone, not on the progress of encoding. A reader
waits for an item that is not encoded yet. A few of the shards that were read stay open.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock

import numpy as np
import xxhash

from ...batch import Features
from ...errors import DataError
from ..data_order import Description, Index
from ..rows.rows import too_many_broken
from ._shards import DatasetReport, ShardedDataset, add, report_from
from .cache import FLOATS, Array, Cached, EncodedStore, Ragged

logger = logging.getLogger(__name__)

# A stream has as many shards as it has rows / 4,096: all of them open were all of its memory, and
# more descriptors than a process may have.
OPEN = 32  # shards that are open at a time; each holds a few file descriptors
MAX_ROWS = 1 << 44  # of a dataset


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

    def shards(self, _count: int) -> int:
        """None: a complete dataset is described as a whole."""
        return 0

    def __getitem__(self, item: int) -> Features:
        """The features of one item, int32."""
        store, place = self._place(item)
        return self.stores[store][place]

    def origin(self, item: int) -> str:
        """The row that an item comes from, for messages."""
        store, row = self.row_of(item)
        return f"row {row} (the first is 0) of dataset {store + 1}"

    def row_of(self, item: int) -> tuple[int, int]:
        """The number of the dataset that an item comes from, and that of its row there."""
        store, place = self._place(item)
        return store, int(self.stores[store].rows[place])

    @cached_property
    def lengths(self) -> Index:
        """[items] tokens of each item."""
        return np.concatenate([store.lengths for store in self.stores])[self.index]

    @cached_property
    def sketches(self) -> Index:
        """[items] a number of the tokens of each item: items of other numbers have other tokens."""
        return np.concatenate([store.sketches for store in self.stores])[self.index]

    def lengths_of(self, items: Index) -> Index:
        """The tokens of each of ``items``, in the same shape."""
        return self.lengths[items]

    def describe(self, _shards: int) -> Description:
        """The items, for a checkpoint; there are no shards to wait for."""
        return {"length": len(self), "dataset": self.fingerprint}

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal items in equal order."""
        digest = xxhash.xxh3_128(" ".join(store.content for store in self.stores).encode())
        digest.update(np.ascontiguousarray(self.index).data)
        return digest.hexdigest()

    def _place(self, item: int) -> tuple[int, int]:
        """The store of an item, and its number there."""
        at = int(self.index[item])
        store = bisect_right(self._starts, at) - 1
        return store, at - self._starts[store]

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *np.cumsum([len(store) for store in self.stores]).tolist()]


class ExampleStream:
    """The items of some datasets, one after another."""

    def __init__(
        self, parts: Sequence[ShardedDataset], more: Callable[[], None], *, max_broken_rows: int = 0
    ) -> None:
        """``more`` is called while a shard is missing; it waits, or raises if nothing encodes."""
        self.parts = parts
        self._more, self._max_broken_rows = more, max_broken_rows
        self._ends = array("q")  # [shards] items up to the end of each
        self._chain: list[str] = []  # [shards] hash of the content up to the end of each
        self._firsts = [0]  # [parts begun] the first shard of each
        self._report = DatasetReport(name=parts[0].rows.name)
        self._stores: dict[int, EncodedStore] = {}  # by shard, the one used last behind the others
        self._lock = Lock()  # of these: a thread may make a window ahead

    @property
    def is_whole(self) -> bool:
        """Whether all shards of all datasets were found."""
        return len(self._firsts) > len(self.parts)

    @property
    def length(self) -> int | None:
        """The number of items, if all datasets are completely encoded."""
        counts = [part.counts() for part in self.parts]
        return None if None in counts else sum(each[1] or 0 for each in counts if each)

    def reach(self, count: int) -> int:
        """Wait for ``count`` items, or the end of the data; returns how many are known."""
        while not self.has(count):
            self._find_next()
        return self._start(len(self._ends))

    def has(self, count: int) -> bool:
        """Whether ``count`` items are known, or all items."""
        return self._start(len(self._ends)) >= count or self.is_whole

    def content(self, shards: int) -> str | None:
        """The hash of the first ``shards`` shards; None if there are fewer."""
        while len(self._chain) < shards and not self.is_whole:
            self._find_next()
        if len(self._chain) < shards:
            return None
        return self._chain[shards - 1] if shards else ""

    def shards(self, count: int) -> int:
        """How many shards contain the first ``count`` items, as far as these are known."""
        return bisect_left(self._ends, count) + 1 if count else 0

    def __getitem__(self, item: int) -> Features:
        """The features of one known item, int32."""
        shard = bisect_right(self._ends, item)
        return self._store(shard)[item - self._start(shard)]

    def lengths_of(self, items: Index) -> Index:
        """[items] Tokens of known items."""
        shards = np.array([bisect_right(self._ends, item) for item in items.tolist()])
        num_tokens = np.empty(len(items), np.int64)
        for shard in np.unique(shards).tolist():
            here = shards == shard
            num_tokens[here] = self._store(shard).lengths[items[here] - self._start(shard)]
        return num_tokens

    def stores(self, count: int) -> list[EncodedStore]:
        """The shards with the first ``count`` items, all open at the same time."""
        count = min(count, self.reach(count))
        return [self._store(shard) for shard in range(self.shards(count))]

    def rows(self, count: int) -> Index:
        """[items] The row of each of up to ``count`` first items, as a unique ascending number."""
        shard_rows = [
            store.rows + self._place(shard)[0] * MAX_ROWS
            for shard, store in enumerate(self.stores(count))
        ]
        return np.concatenate([np.empty(0, np.int64), *shard_rows])[:count]

    def origin(self, item: int) -> str:
        """The row that a known item comes from, for messages."""
        part, row = self.row_of(item)
        return f"row {row} (the first is 0) of {self.parts[part].rows.name}"

    def row_of(self, item: int) -> tuple[int, int]:
        """The number of the dataset that a known item comes from, and that of its row there."""
        shard = bisect_right(self._ends, item)
        return self._place(shard)[0], int(self._store(shard).rows[item - self._start(shard)])

    def describe(self, shards: int) -> Description:
        """The items of the first ``shards`` shards, for a checkpoint; waits for these."""
        content = self.content(shards)
        return {"content": "less" if content is None else content}

    def rows_by_dataset(self, numbers: Index) -> Iterator[tuple[str, list[int]]]:
        """The numbers that ``rows`` gives, as rows of each dataset."""
        for number, part in enumerate(self.parts):
            of_it = numbers[numbers // MAX_ROWS == number] - number * MAX_ROWS
            yield part.rows.name, np.unique(of_it).tolist()

    def _start(self, shard: int) -> int:
        return self._ends[shard - 1] if shard else 0

    def _place(self, shard: int) -> tuple[int, int]:
        """The dataset of a shard, and its number there."""
        part = min(bisect_right(self._firsts, shard), len(self.parts)) - 1
        return part, shard - self._firsts[part]

    def _find_next(self) -> None:
        """Find the next shard, or the end of a dataset; wait a little if neither exists."""
        part, number = self._place(len(self._ends))
        dataset = self.parts[part]
        if (cached := dataset.find(number)) is not None:
            self._take(dataset.rows.name, cached)
        elif (counts := dataset.counts()) is None:
            self._more()
        elif number < counts[0]:
            self._take(dataset.rows.name, dataset.encode_missing(number))
        else:
            self._end_part()

    def _take(self, name: str, cached: Cached) -> None:
        self._report = add(self._report, report_from(cached.report, name))
        if len(self._report.broken) > self._max_broken_rows:
            raise too_many_broken(name, self._report.broken, self._max_broken_rows)
        shard = len(self._ends)
        self._keep(shard, cached.store)
        self._ends.append(self._start(shard) + len(cached.store))
        self._chain.append(self._linked(shard, cached.store))

    def _linked(self, shard: int, store: EncodedStore) -> str:
        """The hash of the content up to the end of a shard."""
        before = self._chain[shard - 1] if shard else ""
        return xxhash.xxh3_128_hexdigest(f"{before} {store.content}".encode())

    def _end_part(self) -> None:
        for line in self._report.lines():
            logger.info("%s", line)
        self._firsts.append(len(self._ends))
        if not self.is_whole:
            self._report = DatasetReport(name=self.parts[len(self._firsts) - 1].rows.name)

    def _store(self, shard: int) -> EncodedStore:
        with self._lock:
            store = self._stores.get(shard)
        if store is None:
            part, number = self._place(shard)
            dataset = self.parts[part]
            store = (dataset.find(number) or dataset.encode_missing(number)).store
            # Encoded again, perhaps by another version of a library: the steps that were taken of
            # it would not be those of a resume.
            if self._linked(shard, store) != self._chain[shard]:
                raise DataError(
                    f"{dataset.folder}: shard {number} has other tokens than when this run first "
                    "read it; start the same command again"
                )
        self._keep(shard, store)
        return store

    def _keep(self, shard: int, store: EncodedStore) -> None:
        with self._lock:
            self._stores.pop(shard, None)
            self._stores[shard] = store
            if len(self._stores) > OPEN:
                del self._stores[next(iter(self._stores))]


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
