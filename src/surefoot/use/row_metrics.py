"""What a run has measured of each of its rows, in words: which rows are the worst, which do not get
better from epoch to epoch, and which are those of a step.

The run has written numbers in the order of training (``training.callbacks.step_files``). Which rows
they are of follows from its recipe and its data, which are opened here; no model is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.data_order import Index
from ..data.order.loader import Shuffle
from ..data.text.preview import as_line
from ..data.training_data import AnyData, open_stream, prepare, row_places
from ..errors import RunError
from ..run.parts import RunParts
from ..run.rows_record import RowsRecord
from ..training.callbacks.step_files import recorded

NEIGHBORS = 64  # rows that were trained about when a row was, with which it is compared
Values = NDArray[np.float64]


@dataclass(frozen=True)
class RowMetric:
    """One row, and what was measured of it."""

    item: int  # its number in the training data
    place: str  # file and line
    values: Sequence[float]  # in each epoch; NaN: not trained, inf: the loss was NaN or infinite
    steps: Sequence[int]  # that trained it, as far as they are known
    text: str  # as the model reads it; what is trained stands in [[ ]]


@dataclass(frozen=True)
class RunRows:
    """The rows of a run, and what was measured of them."""

    run: Path
    parts: RunParts
    data: AnyData
    steps: NDArray[Any]  # [steps] ``step_files.STEP``
    rows: NDArray[np.float32]  # [rows] in the order of training

    @classmethod
    def of(cls, run: Path, parts: RunParts) -> RunRows:
        """Those of ``run``, which is made of ``parts``. Raises ``RunError``: nothing was written of
        its rows, or they are other rows now."""
        steps, rows = recorded(run)
        is_streamed = parts.data.streaming
        data = open_stream(parts.encoding, _raise_gone) if is_streamed else prepare(parts.encoding)
        names = [str(name) for name in parts.data.datasets]
        before = None if data.whole is None else RowsRecord.read(run)
        if before and data.whole is not None and before.data != data.whole.fingerprint:
            now = RowsRecord.of(data.whole, names, parts.codec)
            changes = "; ".join(list(before.changes(now))[:3]) or "other rows are trained on"
            raise RunError(f"{run}: its rows have changed since it was trained: {changes}")
        return cls(run, parts, data, steps, rows)

    @property
    def metric(self) -> str:
        """What was measured of each row."""
        return self.parts.stage.row_metric[0]

    @cached_property
    def _order(self) -> Shuffle:
        return self.data.order(self.parts.data, seed=self.parts.train.seed)

    @cached_property
    def _by_epoch(self) -> list[tuple[Index, Values]]:
        """For each epoch, the items in the order of training, and their values."""
        size = self._order.num_examples or len(self.rows)
        epochs = range(-(-len(self.rows) // size))
        values = [self.rows[e * size : (e + 1) * size].astype(float) for e in epochs]
        return [(self._order.indices(e, 0, len(v)), v) for e, v in zip(epochs, values, strict=True)]

    @cached_property
    def _excess(self) -> Values:
        """[epochs, items] by how much each row is worse than those that were trained about when it
        was: an early step is worse than a late one, whatever its rows are."""
        sign = -1.0 if self.parts.stage.row_metric[1] else 1.0
        excess = np.full(self.table.shape, np.nan)
        for epoch, (items, values) in enumerate(self._by_epoch):
            is_known = ~np.isnan(values)
            known = values[is_known]
            size = max(NEIGHBORS, self.parts.train.global_batch_size)
            parts = np.array_split(known, max(1, len(known) // size))
            above = [_above_median(part, sign) for part in parts]
            excess[epoch, items[is_known]] = np.concatenate(above)
        return excess

    @cached_property
    def table(self) -> Values:
        """[epochs, items] what was measured; NaN: not known."""
        count = 1 + max(int(items.max(initial=-1)) for items, _ in self._by_epoch)
        table = np.full((len(self._by_epoch), count), np.nan)
        for row, (items, values) in zip(table, self._by_epoch, strict=True):
            row[items] = values
        return table

    def worst(self, count: int) -> list[RowMetric]:
        """The rows that are furthest from those around them, on average over the epochs."""
        num_known = (~np.isnan(self._excess)).sum(0)
        means = np.nansum(self._excess, axis=0) / np.maximum(num_known, 1)
        means[num_known == 0] = -np.inf
        first = np.argsort(-means, kind="stable")[:count]
        return self.described([int(i) for i in first if means[i] > 0])

    def stuck(self) -> Index:
        """The items that were trained in several epochs and never better than in the first one,
        the worst first."""
        sign = -1.0 if self.parts.stage.row_metric[1] else 1.0
        values = self.table * sign
        if len(values) < 2:
            return np.empty(0, np.int64)
        later = np.where(np.isnan(values[1:]), np.inf, values[1:]).min(0)
        is_stuck = ~np.isnan(values[0]) & np.isfinite(later) & (later >= values[0])
        items = np.flatnonzero(is_stuck)
        return items[np.argsort(-values[0][items], kind="stable")]

    def spikes(self, count: int) -> list[tuple[int, float, float]]:
        """The steps whose mean loss is furthest above the median of those around it, itself and
        five on each side, with that; none if no step is above it by half."""
        with np.errstate(invalid="ignore", divide="ignore"):
            losses = np.nan_to_num(self.steps["loss"] / self.steps["weight"], nan=np.inf)
        padded = np.pad(losses, 5, mode="edge")
        around = np.median(np.lib.stride_tricks.sliding_window_view(padded, 11), axis=1)
        above = np.where(losses > 1.5 * np.abs(around), losses - around, -np.inf)
        first = np.argsort(-above, kind="stable")[:count]
        return [(int(i) + 1, losses[i], around[i]) for i in first if above[i] > 0]

    def of_step(self, step: int) -> list[RowMetric]:
        """The rows of a step, the worst first. Raises ``RunError``: it is not known."""
        if step > len(self.steps):
            raise RunError(
                f"{self.run}: is at step {len(self.steps):,} (as far as it has logged), so there "
                f"is no step {step:,}"
            )
        first, size = int(self.steps["first_row"][step - 1]), self._order.num_examples
        epoch, start = divmod(first, size) if size else (0, first)
        count = self.parts.train.global_batch_size
        values = self.rows[first : first + (min(count, size - start) if size else count)]
        if np.isnan(values).all():
            raise RunError(f"{self.run}: nothing was recorded of step {step:,}")
        items = self._order.indices(epoch, start, start + len(values))
        sign = 1.0 if self.parts.stage.row_metric[1] else -1.0
        order = np.argsort(np.nan_to_num(sign * values, nan=np.inf), kind="stable")
        rows = self.described([int(items[i]) for i in order])
        pairs = zip(rows, order, strict=True)
        return [replace(row, values=[float(values[i])]) for row, i in pairs]

    def described(self, items: Sequence[int]) -> list[RowMetric]:
        """These items, with all that is known of them."""
        source = self.data.train
        places = row_places(self.parts.data, source, items)
        return [
            RowMetric(
                item,
                place,
                self.table[:, item].tolist(),
                self._steps_of(item),
                as_line(self.parts.codec, source[item]),
            )
            for item, place in zip(items, places, strict=True)
        ]

    def _steps_of(self, item: int) -> list[int]:
        """The steps that trained it: of several of a window, the first."""
        size, firsts, steps = self._order.num_examples or 0, self.steps["first_row"], []
        for epoch, (items, values) in enumerate(self._by_epoch):
            (places,) = np.nonzero(items == item)
            for row in epoch * size + places[~np.isnan(values[places])]:
                first = firsts[np.searchsorted(firsts, row, side="right") - 1]
                # Of a window without a difference of rewards no step was taken.
                if first <= row < first + self.parts.train.global_batch_size:
                    steps.append(int(np.searchsorted(firsts, first)) + 1)
        return steps


def _above_median(values: Values, sign: float) -> Values:
    """By how much each value is worse than the median; infinite where the loss was NaN."""
    finite = values[np.isfinite(values)]
    middle = float(np.median(finite)) if len(finite) else 0.0
    return np.where(np.isfinite(values), sign * (values - middle), np.inf)


def _raise_gone() -> None:
    raise RunError(
        "the rows of this run are streamed, and are not encoded here any more; run `surefoot "
        "encode` on its recipe first"
    )
