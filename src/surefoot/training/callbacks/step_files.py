"""The metrics of every step and every row of a run, in two files of its folder. Both are little-
endian, and as far as ``metrics.jsonl`` is; a resume cuts off what is behind its checkpoint.

steps.bin   24 bytes a step, from step 1: the sum of its loss (float64), the gradient norm before
            clipping (float64), the weight of the sum (float32, exact up to 16,777,216), and how
            many rows the run has trained on before the step's window (uint32)
rows.f32    a float32 for each row of each epoch, in the order of training: of row i before a window
            that begins with row n, in bytes 4 (n + i)

Which item of the data a row is follows from seed, epoch and place (``data.order``), so it is not
written. NaN is what is not known, as of a skipped window; inf is of a row whose loss is NaN or
infinite. No torch, so that a reader starts at once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import RunError, explain
from ...storage import files

if TYPE_CHECKING:
    from ...parallel.world import World
    from ..step import StepMetrics

logger = logging.getLogger(__name__)
STEPS, ROWS = "steps.bin", "rows.f32"
STEP = np.dtype([("loss", "<f8"), ("grad_norm", "<f8"), ("weight", "<f4"), ("first_row", "<u4")])
ROW = np.dtype("<f4")
_MAX_BYTES = 1 << 35
_MOST_ROWS = (1 << 32) - 1  # that ``first_row`` can count
Rows = dict[int, list[tuple[Any, Any]]]  # by the first row of a window: places in it, and values


@dataclass
class StepFiles:
    """Writes both files, together with each log, evaluation and save. A disk that cannot hold them
    does not stop a run."""

    folder: Path | None  # None: of a trial, nothing is recorded
    world: World
    _first_step: int = field(default=1, init=False)  # of the steps that are not written yet
    _steps: list[tuple[float, ...]] = field(default_factory=list, init=False)
    _rows: Rows = field(default_factory=dict, init=False)
    _is_failing: bool = field(default=False, init=False)

    def begin(self, step: int, num_rows: int) -> None:
        """The run is after ``step`` and after the window that ends with row ``num_rows``: what is
        behind them is truncated."""
        self._first_step = step + 1
        self._steps, self._rows = [], {}
        sizes = {STEPS: step * STEP.itemsize, ROWS: num_rows * ROW.itemsize}
        for name, size in sizes.items() if self.folder and self.world.is_main else ():
            path = Path(self.folder or "", name)
            with suppress(OSError):  # of a file that cannot be written either, which is said
                if (files.size_of(path) or 0) > size:
                    os.truncate(path, size)

    def add(self, first_row: int, groups: Sequence[Any], metrics: StepMetrics) -> None:
        """Add the next step, whose window begins with ``first_row``; ``groups`` are the places in
        it of the examples of each of this rank's micro-batches, if they are rows of the data."""
        sums = metrics.loss, metrics.grad_norm, metrics.weight
        self._steps.append((*sums, min(first_row, _MOST_ROWS)))
        # Behind the examples of a micro-batch may be one that stands for a picture, or for none.
        for places, values in zip(groups, metrics.rows, strict=False):
            here = values.numpy()[: len(places)]
            values_or_inf = np.where(np.isnan(here), ROW.type(np.inf), here)
            self._rows.setdefault(first_row, []).append((places, values_or_inf))

    def add_rows(self, first_row: int, values: Sequence[float]) -> None:
        """Add the rows of the window that begins with ``first_row``, of which every rank knows."""
        self._rows[first_row] = [(np.arange(len(values)), np.asarray(values, ROW))]

    def flush(self) -> None:
        """Write what was added. A collective call."""
        if self.folder is None:
            return
        rows, steps = Rows(), np.array(self._steps, STEP)
        for of_rank in self.world.gathered(self._rows):
            for first, parts in of_rank.items():
                rows.setdefault(first, []).extend(parts)
        first_step, self._first_step = self._first_step, self._first_step + len(steps)
        self._steps, self._rows = [], {}
        if not self.world.is_main:
            return
        try:
            files.make_folder(self.folder)
            _write(self.folder / STEPS, [(first_step - 1, steps)], STEP)
            _write(self.folder / ROWS, [(n, _joined(rows[n])) for n in sorted(rows)], ROW)
        except OSError as error:
            if not self._is_failing:
                logger.warning("%s and %s: not written: %s", STEPS, ROWS, explain(error))
            self._is_failing = True


def _joined(parts: Sequence[tuple[Any, Any]]) -> NDArray[Any]:
    """The rows of one window, of all ranks."""
    places, values = (np.concatenate(each) for each in zip(*parts, strict=True))
    row_values = np.full(1 + int(places.max(initial=-1)), np.nan, ROW)
    row_values[places] = values
    return row_values


def _write(path: Path, blocks: Sequence[tuple[int, NDArray[Any]]], dtype: np.dtype[Any]) -> None:
    """Write each block at its record of the file. What is missing before it becomes NaN."""
    with files.open_or_create(path) as file:
        for first, values in blocks:
            size = file.size // dtype.itemsize
            missing = np.frombuffer(b"\xff" * dtype.itemsize * max(0, first - size), dtype)
            if len(missing):  # all bits are set: a NaN in each float
                file.write_at(size * dtype.itemsize, missing.tobytes())
            file.write_at(first * dtype.itemsize, values.tobytes())


def read_step_file(folder: Path, name: str) -> NDArray[Any]:
    """All whole records of STEPS, from step 1, or of ROWS; none without the file."""
    dtype = STEP if name == STEPS else ROW
    with suppress(FileNotFoundError):
        content = files.read_inside(folder, name, _MAX_BYTES)
        return np.frombuffer(content[: len(content) // dtype.itemsize * dtype.itemsize], dtype)
    return np.empty(0, dtype)


def recorded(run: Path) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """The records of both files of ``run``. Raises ``RunError`` if it has none."""
    steps, rows = (read_step_file(run, name) for name in (STEPS, ROWS))
    if not len(steps):
        raise RunError(
            f"{run}: has no metrics of its steps and rows; an earlier version of Surefoot trained "
            "it, or no step is logged or saved yet. `surefoot replay` computes a step again, with "
            "--rows also the gradients of its rows"
        )
    if not len(rows):
        raise RunError(
            f"{run}: has no {ROWS}: the loss of this run has no numbers of rows; a loss that is "
            "given from Python gives them as surefoot.batch.Loss(..., rows=...)"
        )
    return steps, rows
