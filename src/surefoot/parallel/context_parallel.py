"""Context parallelism: several ranks share each packed row. Each computes some of its tokens, and
fetches the keys and values that their queries attend to, by one all-to-all per layer.

Who computes and who fetches what follows from the documents of the row alone, so every rank
computes the whole plan, and no rank waits to learn it. Everything else in a layer sees one token at
a time. If no document is divided, nothing is sent.

There is no axis of the mesh for it: neighboring ranks of the data axes, which would have other
rows, have the same. FSDP sums gradients over the data axes as before, and the loss of a row, which
each of its ranks computes from the outputs of all tokens, counts once (``World.summed``).

Shapes: T tokens of the row, L of this rank, R fetched, X keys that its queries attend to, one run
of queries after the other, N trained positions, D documents.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import ceil, inf

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ..batch import Batch, Outputs, TrainedPositions, sent
from ._collectives import through
from .progress import wait_for_ranks
from .world import RowGroup

Index = NDArray[np.int64]
Range = tuple[int, int]  # of positions in the row
Documents = Sequence[Sequence[int]]  # for each, the tokens of its prompt and of each response
_MORE_TOKENS = 1 / 32  # than the mean, where this leaves a document whole
_MORE_PAIRS = 0.05  # of queries and keys than the mean, likewise
_MOST_SPREAD = 4  # documents that are divided among all ranks where others leave them uneven


@dataclass(frozen=True)
class KeyExchange:
    """What this rank computes in a layer, sends and receives; ``queries`` and ``keys`` are the
    lengths of runs of queries, and of the keys whose ends they are."""

    queries: Sequence[int]
    keys: Sequence[int]
    index: Index | None  # [X] the keys among fetched and own ones; None: its own, in order
    sent: Index  # the tokens that are sent, to one rank after the other
    num_sent: Sequence[int]  # to each rank
    num_received: Sequence[int]  # from each rank
    is_local: bool  # whether no rank fetches anything


class PackedRowPart:
    """One rank's part of a packed row, which ``group`` shares: a multiple of ``unit`` tokens."""

    def __init__(self, documents: Documents, group: RowGroup, unit: int = 1) -> None:
        self.group, self._documents = group, documents
        length = sum(map(sum, documents))
        self.owner = np.empty(length, np.int64)  # [T] whose each token is
        self.place = np.empty(length, np.int64)  # [T] where it is among those of that rank
        for rank, ranges in enumerate(assigned(documents, group.size, unit)):
            for start, stop in ranges:
                self.owner[start:stop] = rank
        for rank in range(group.size):
            tokens = np.flatnonzero(self.owner == rank)
            self.place[tokens] = np.arange(len(tokens))
        self.tokens = np.flatnonzero(self.owner == group.rank)  # [L]
        self._exchanges = dict[int | None, KeyExchange]()
        self._on_device = dict[tuple[str, int | None], torch.Tensor]()

    def runs(self, window: int | None) -> tuple[Sequence[int], Sequence[int]]:
        """The lengths of this rank's runs of queries, and of the keys that each attends to: the
        queries are the last of them. With a sliding ``window``, the first keys are absent."""
        exchange = self.exchange(window)
        return exchange.queries, exchange.keys

    def fetched(self, heads: Sequence[torch.Tensor], window: int | None) -> list[torch.Tensor]:
        """[1, H, X, E] of each of the keys and values [1, H, L, E], run after run. A collective
        call, unless no rank fetches anything."""
        exchange = self.exchange(window)
        if not exchange.is_local:
            flat = [head[0].transpose(0, 1).flatten(1) for head in heads]  # [L, H E]
            tokens = self._placed("sent", window, exchange.sent, heads[0].device)
            received = _fetch(torch.cat(flat, 1), tokens, exchange, self.group)
            parts = torch.split(received, [part.shape[1] for part in flat], 1)
            heads = [_behind(part, head) for part, head in zip(parts, heads, strict=True)]
        if exchange.index is None:
            return list(heads)
        index = self._placed("index", window, exchange.index, heads[0].device)
        return [head.index_select(2, index) for head in heads]

    def exchange(self, window: int | None) -> KeyExchange:
        """The exchange of layers with this ``window``."""
        if window not in self._exchanges:
            self._exchanges[window] = self._planned(window)
        return self._exchanges[window]

    def num_fetched(self, window: int | None) -> list[int]:
        """The tokens whose keys and values each rank fetches."""
        return [len(self._needs(rank, window)) for rank in range(self.group.size)]

    def _planned(self, window: int | None) -> KeyExchange:
        size, me = self.group.size, self.group.rank
        needs = [self._needs(rank, window) for rank in range(size)]
        runs = list(self._runs(me, window))
        to_send = [self.place[of_rank[self.owner[of_rank] == me]] for of_rank in needs]
        where = np.empty(len(self.owner), np.int64)
        where[needs[me]] = np.arange(len(needs[me]))
        where[self.tokens] = len(needs[me]) + np.arange(len(self.tokens))
        keys = [np.arange(*keys) for _, of_run in runs for keys in of_run]
        index = where[np.concatenate(keys)] if keys else np.empty(0, np.int64)
        is_local = not any(map(len, needs))
        is_plain = is_local and np.array_equal(index, np.arange(len(self.tokens)))
        return KeyExchange(
            queries=[stop - start for (start, stop), _ in runs],
            keys=[sum(stop - start for start, stop in of_run) for _, of_run in runs],
            index=None if is_plain else index,
            sent=np.concatenate(to_send),
            num_sent=[len(part) for part in to_send],
            num_received=np.bincount(self.owner[needs[me]], minlength=size).tolist(),
            is_local=is_local,
        )

    def _needs(self, rank: int, window: int | None) -> Index:
        """The tokens that ``rank`` fetches, those of one rank after the other."""
        is_needed = np.zeros(len(self.owner), np.bool_)
        for _, of_run in self._runs(rank, window):
            for start, stop in of_run:
                is_needed[start:stop] = True
        tokens = np.flatnonzero(is_needed & (self.owner != rank))
        return tokens[np.argsort(self.owner[tokens], kind="stable")]

    def _runs(self, rank: int, window: int | None) -> Iterator[tuple[Range, list[Range]]]:
        """Each run of the queries of ``rank``, and the keys that it attends to."""
        sequences = list(_sequences(self._documents))
        starts = [start for _, (start, _) in sequences]
        for first, last in _ranges(np.flatnonzero(self.owner == rank)):
            for number in range(bisect_right(starts, first) - 1, bisect_right(starts, last - 1)):
                (prompt, end), (start, stop) = sequences[number]
                low, high = max(first, start), min(last, stop)
                before = end - prompt + low - start  # tokens of its sequence before this run
                hidden = 0 if window is None else max(0, before - window + 1)
                keys = [(prompt + hidden, end), (start + max(0, hidden - (end - prompt)), high)]
                yield (low, high), [(a, z) for a, z in keys if a < z]

    def _placed(
        self, name: str, window: int | None, index: Index, device: torch.device
    ) -> torch.Tensor:
        """``index`` on ``device``, copied once for all layers."""
        if (name, window) not in self._on_device:
            self._on_device[name, window] = sent(torch.tensor(index), device)
        return self._on_device[name, window]


def part_of(batch: Batch, group: RowGroup, unit: int = 1) -> PackedRowPart:
    """This rank's part of a packed row."""
    assert batch.cu_seqlens is not None, "parallel.cp divides packed rows"
    bounds, branches = batch.cu_seqlens, batch.branches
    if branches is not None:
        return PackedRowPart(branches.tolist(), group, unit)
    return PackedRowPart([(z - a, 0) for a, z in pairwise(bounds.tolist())], group, unit)


def cut(batch: Batch, group: RowGroup, unit: int = 1) -> tuple[Batch, PackedRowPart]:
    """This rank's part of a packed row, of a multiple of ``unit`` tokens. Its trained positions are
    those of the row, so no label is lost where a document is divided."""
    assert not batch.media, "parallel.cp divides rows of text"
    part, batch = part_of(batch, group, unit), batch.located()
    device = batch.input_ids.device
    tokens = sent(torch.tensor(part.tokens), device)

    def here(at: TrainedPositions | None) -> TrainedPositions | None:
        if at is None:
            return None
        mine = np.flatnonzero(part.owner[at.host_columns] == group.rank)
        columns = sent(torch.tensor(part.place[at.host_columns[mine]]), device)
        among = sent(torch.tensor(mine), device)
        return replace(
            at, labels=at.labels[among], rows=at.rows[among], columns=columns, kept=columns
        )

    return replace(
        batch,
        input_ids=batch.input_ids[:, tokens],
        labels=batch.labels[:, tokens],
        position_ids=batch.position_ids[:, tokens],
        axes=None if batch.axes is None else batch.axes[..., tokens],
        at=here(batch.at),
        at_ends=here(batch.at_ends),
        part=part,
    ), part


def joined(outputs: Outputs, at: TrainedPositions, part: PackedRowPart) -> Outputs:
    """The outputs of the row from those of its parts, the same on every rank; ``at`` are its
    positions. A collective call."""
    group, owner = part.group, part.owner[at.host_columns]
    counts = np.bincount(owner, minlength=group.size).tolist()
    order = np.argsort(owner, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    row_outputs = dict[str, object]()
    for name in _OF_POSITIONS:
        if (values := getattr(outputs, name)) is not None:
            in_order = sent(torch.tensor(place), values.device)
            row_outputs[name] = _join(values, counts, group)[in_order]
    for name in _OF_ROWS:
        if (total := getattr(outputs, name)) is not None:
            row_outputs[name] = _sum(total, group)
    if (router := outputs.router) is not None:
        sums = _sum(router.probabilities, group), _sum(router.counts, group)
        row_outputs["router"] = replace(router, probabilities=sums[0], counts=sums[1])
    return replace(outputs, **row_outputs)  # type: ignore[arg-type]


_OF_POSITIONS = [
    *("logps", "entropies", "top_entropies", "values", "predictions", "divergences"),
    "plain_logps",
]
_OF_ROWS = ("total", "smoothed")


def assigned(documents: Documents, size: int, unit: int = 1) -> list[list[Range]]:
    """The tokens of each of ``size`` ranks, as ranges in ascending order: about as many tokens, and
    as many pairs of a query and a key, on each rank.

    Documents are assigned, the longest first, each to the rank with the fewest pairs, if it has
    room. One that would be too much is divided among as few ranks as can take it: each gets tokens
    around those that have the mean number of keys, so that of a document alone the last rank has
    the head and the tail. If the ranks then are not even, the longest documents are divided among
    all. Of a model with sliding windows, tokens decide, of which each rank has as many. With a
    ``unit``, parts are multiples of it, and the row must be one.
    """
    areas = [_num_pairs(document) for document in documents]
    most, best = inf, list[list[Range]]()
    for num_spread in range(min(_MOST_SPREAD, len(documents)) + 1):
        parts, largest = _assigned(documents, areas, size, unit, num_spread)
        if largest < most:
            most, best = largest, parts
        if largest <= (1 + 2 * _MORE_PAIRS) * sum(areas) / size:
            break
    if not all(best):  # no more documents than ranks, and all alike
        length = sum(map(sum, documents))
        bounds = [length // unit * rank // size * unit for rank in range(size + 1)]
        return [[(bounds[rank], bounds[rank + 1])] for rank in range(size)]
    return best


def _assigned(
    documents: Documents, areas: Sequence[int], size: int, unit: int, num_spread: int
) -> tuple[list[list[Range]], float]:
    """The same, with the ``num_spread`` longest documents divided among all ranks, and the pairs of
    the rank with the most."""
    starts = [0, *accumulate(map(sum, documents))]
    mean = sum(areas) / size
    room, need = _rooms(starts[-1], size, unit), [mean] * size
    tokens: list[list[Range]] = [[] for _ in range(size)]
    order = sorted(range(len(documents)), key=lambda number: -areas[number])
    for place, number in enumerate(order):
        start, length, area = starts[number], sum(documents[number]), areas[number]
        fitting = [rank for rank in range(size) if room[rank] >= length]
        rank = max(fitting, key=need.__getitem__, default=None)
        is_spread = place < num_spread
        is_small = rank is not None and area <= need[rank] + _MORE_PAIRS * mean
        if rank is not None and is_small and not is_spread:
            tokens[rank].append((start, start + length))
            room[rank] -= length
            need[rank] -= area
            continue
        least = size if is_spread else 1
        shares = _shares(length, area, room, need, _MORE_PAIRS * mean, least)
        costs = _num_keys(documents[number])
        for rank, places in _divided(costs, shares):
            tokens[rank] += [(start + first, start + last) for first, last in _ranges(places)]
            room[rank] -= len(places)
            need[rank] -= float(costs[places].sum())
    return [sorted(ranges) for ranges in tokens], mean - min(need)


def _rooms(length: int, size: int, unit: int) -> list[int]:
    """The most tokens of each rank."""
    if unit == 1:
        return [ceil(length / size * (1 + _MORE_TOKENS))] * size
    count = length // unit
    return [(count * (rank + 1) // size - count * rank // size) * unit for rank in range(size)]


def _num_pairs(document: Sequence[int]) -> int:
    """Pairs of a query and a key in a document."""
    prompt, first, *later = document
    ends = [(0, prompt + first), *((prompt, length) for length in later)]
    return sum(before * length + length * (length + 1) // 2 for before, length in ends)


def _num_keys(document: Sequence[int]) -> Index:
    """[tokens] how many keys each query of a document attends to."""
    prompt, first, *later = document
    runs = [np.arange(prompt + first), *(np.arange(prompt, prompt + length) for length in later)]
    return np.concatenate(runs) + 1


def _shares(
    length: int, area: int, room: Sequence[int], need: Sequence[float], more: float, least: int
) -> list[tuple[int, int, float]]:
    """The fewest ranks, but at ``least`` so many, that can share a document, with the tokens of
    each and its pairs."""
    order = sorted((rank for rank in range(len(room)) if room[rank]), key=lambda r: -need[r])
    count = min(least, len(order))
    while count < len(order) and (
        sum(room[rank] for rank in order[:count]) < length
        or sum(need[rank] + more for rank in order[:count]) < area
    ):
        count += 1
    chosen = order[:count]
    all_room = sum(room[rank] for rank in chosen)
    ends = [0, *accumulate(room[rank] for rank in chosen)]
    ends = [end * length // all_room for end in ends]
    wanted = [max(need[rank], 0.0) + more for rank in chosen]
    return [
        (rank, stop - start, area * pairs / sum(wanted))
        for rank, pairs, (start, stop) in zip(chosen, wanted, pairwise(ends), strict=True)
    ]


def _divided(
    num_keys: Index, shares: Sequence[tuple[int, int, float]]
) -> Iterator[tuple[int, Index]]:
    """The tokens of a document that each rank gets: a stretch of what the ranks before have left,
    where it has about the pairs that the rank wants. The last one gets what is left."""
    left = np.arange(len(num_keys))
    for rank, count, pairs in shares[:-1]:
        sums = np.concatenate([[0], np.cumsum(num_keys[left])])
        first = int(np.abs(sums[count:] - sums[: len(sums) - count] - pairs).argmin())
        yield rank, left[first : first + count]
        left = np.delete(left, slice(first, first + count))
    yield shares[-1][0], left


def _sequences(documents: Documents) -> Iterator[tuple[Range, Range]]:
    """For each causal sequence, the prompt that it shares with the one before it, if any, and its
    own tokens, which are those of no other one."""
    start = 0
    for prompt, first, *later in documents:
        stop = start + prompt + first
        if stop > start:
            yield (start, start), (start, stop)
        for length in filter(None, later):
            yield (start, start + prompt), (stop, stop + length)
            stop += length
        start = stop


def _ranges(tokens: Index) -> list[Range]:
    """Ascending positions as ranges."""
    if not len(tokens):
        return []
    parts = np.split(tokens, np.flatnonzero(np.diff(tokens) != 1) + 1)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]


def _behind(received_RX: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """[1, H, R + L, E] this rank's keys or values [1, H, L, E] behind those that it fetched."""
    parts = received_RX.reshape(len(received_RX), head.shape[1], head.shape[3])
    return torch.cat([parts.transpose(0, 1)[None], head], 2)


def _fetch(
    mine_LX: torch.Tensor, tokens: torch.Tensor, exchange: KeyExchange, group: RowGroup
) -> torch.Tensor:
    """[R, X] what this rank fetches, by one all-to-all; gradients return to where they belong, and
    are summed there. ``tokens`` are those that are sent."""
    length, num_sent, num_received = len(mine_LX), exchange.num_sent, exchange.num_received

    def forward(mine_LX: torch.Tensor) -> torch.Tensor:
        return _exchanged(mine_LX.index_select(0, tokens), num_sent, num_received, group)

    def backward(gradient_RX: torch.Tensor) -> torch.Tensor:
        back = _exchanged(gradient_RX, num_received, num_sent, group)
        return back.new_zeros(length, back.shape[1]).index_add_(0, tokens, back)

    return through(mine_LX, forward, backward)


def _exchanged(
    rows: torch.Tensor, num_sent: Sequence[int], num_received: Sequence[int], group: RowGroup
) -> torch.Tensor:
    received = rows.new_empty(sum(num_received), rows.shape[1])
    if group.group is not None:
        wait_for_ranks(
            dist.all_to_all_single,
            received,
            rows.contiguous(),
            list(num_received),
            list(num_sent),
            group=group.group,
        )
    return received


def _join(mine_N: torch.Tensor, counts: Sequence[int], group: RowGroup) -> torch.Tensor:
    """The values of all ranks, each a number or several. What is computed of them is the same on
    each, so each takes its own part of the gradient."""

    def forward(mine_N: torch.Tensor) -> torch.Tensor:
        missing = max(counts) - len(mine_N)  # an all-gather needs one length
        padded = torch.cat([mine_N, mine_N.new_zeros(missing, *mine_N.shape[1:])])
        parts = [torch.empty_like(padded) for _ in counts]
        if group.group is not None:
            wait_for_ranks(dist.all_gather, parts, padded, group=group.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    first, count = sum(counts[: group.rank]), counts[group.rank]
    return through(mine_N, forward, lambda gradient_N: gradient_N.narrow(0, first, count))


def _sum(mine: torch.Tensor, group: RowGroup) -> torch.Tensor:
    """The sum of all ranks' ``mine``; its gradient is that of each."""

    def forward(mine: torch.Tensor) -> torch.Tensor:
        total = mine.clone()
        if group.group is not None:
            wait_for_ranks(dist.all_reduce, total, group=group.group)
        return total

    return through(mine, forward, lambda gradient: gradient)
