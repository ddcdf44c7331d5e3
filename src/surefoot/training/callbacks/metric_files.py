"""The metrics of a run, in the files of its folder.

metrics.jsonl     one JSON object per line, appended at once, no step twice
loss.png          both losses over the steps, redrawn at the end, and at saves once it is old
tensorboard/      event files, for ``report_to: [tensorboard]``

The ``metrics.jsonl`` of a killed run has lines of steps after its latest checkpoint. When the run
resumes, it repeats those steps; bitwise equal metrics are not written again. If they differ
(another recipe, a rollback), the old lines from there on are deleted, and the new ones are
appended. Lines of earlier steps that are missing or damaged, after a power failure say, are
restored from the checkpoint.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import RecipeError, RunError, explain, installation
from ...storage.files import (
    append_line,
    make_folder,
    raising,
    read_file,
    rename,
    write_aside,
)
from ..arguments import Context
from ..callback import Metrics, TrainerCallback, TrainerControl, TrainerState

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


logger = logging.getLogger(__name__)
METRICS = "metrics.jsonl"
PLOT = "loss.png"
TENSORBOARD = "tensorboard"
OF_THE_CLOCK = ("tokens_per_second", "elapsed")  # figures that no resume can repeat
Record = Mapping[str, float | None]
Key = tuple[int, bool]  # step, and whether the line is of an evaluation
Lines = dict[Key, tuple[int, Record]]  # where each line begins, and its content


@dataclass
class Jsonl(TrainerCallback):
    """Appends every log to ``path``."""

    path: Path
    _lines: Lines = field(default_factory=dict)

    def on_train_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Read the existing lines, and restore those that the log of the run has in addition; an
        incomplete last line after a crash is deleted."""
        self._lines = restore(self.path, state.log_history)

    def on_log(
        self, args: Context, state: TrainerState, control: TrainerControl, logs: Metrics
    ) -> None:
        """Append one line, unless it already exists."""
        record = strict(logs)
        key = key_of(record)
        if key in self._lines:
            offset, old = self._lines[key]
            # The file keeps the first figures of the clock, so that trackers that follow it need
            # not send a line twice.
            if repeatable(old) == repeatable(record):
                return
            os.truncate(self.path, offset)
            self._lines = {k: line for k, line in self._lines.items() if line[0] < offset}
        offset = self.path.stat().st_size if self.path.exists() else 0
        self._lines[key] = (offset, record)
        with raising(RunError, "metrics"):
            append_line(self.path, json.dumps(record))


def restore(path: Path, history: Sequence[Metrics]) -> Lines:
    """Give the file at ``path`` the lines of a run's ``history`` that it lacks; returns all lines.
    An incomplete last line is deleted."""
    with raising(RunError, "metrics"):
        make_folder(path.parent)
        content = read_file(path) if path.exists() else b""
        records = _restored(list(_records(content)), history)
        lines = [f"{json.dumps(record)}\n".encode() for record in records]
        if (text := b"".join(lines)) != content:
            write_aside(path, text)
    offsets = itertools.accumulate((len(line) for line in lines), initial=0)
    return {key_of(r): (at, r) for at, r in zip(offsets, records, strict=False)}


def lines_of(path: Path, history: Sequence[Metrics] = ()) -> dict[Key, Record]:
    """The records of the file at ``path``, and those of a run's ``history`` that it lacks, in the
    order of steps; nothing is written."""
    with raising(RunError, "metrics"):
        content = read_file(path) if path.exists() else b""
    records = [strict(record) for record in history if "step" in record] + [*_records(content)]
    return dict(sorted({key_of(record): record for record in records}.items()))


def _records(content: bytes) -> Iterator[Record]:
    """The records of the lines before the first one that is incomplete or damaged."""
    for line in content.splitlines(keepends=True):
        record = _parse(line)
        if record is None:
            return
        yield record


def _restored(from_file: Sequence[Record], history: Sequence[Metrics]) -> list[Record]:
    """The records of the run's log so far, and those ``from_file`` that it does not have. Of equal
    ones that of the file stays: the clock's figures are those of the first time."""
    unlogged = {key_of(record): record for record in from_file}
    logged = [strict(record) for record in history if "step" in record]
    records = [_first(unlogged.pop(key_of(record), None), record) for record in logged]
    return sorted([*records, *unlogged.values()], key=key_of)


def _first(from_file: Record | None, logged: Record) -> Record:
    is_same = from_file is not None and repeatable(from_file) == repeatable(logged)
    return from_file if from_file is not None and is_same else logged


def strict(record: Metrics) -> Record:
    """The record as its line has it."""
    return {name: _finite(value) for name, value in record.items()}


def _parse(line: bytes) -> Record | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def key_of(record: Mapping[str, object]) -> Key:
    """The step of a record, and whether it is of an evaluation."""
    return int(str(record["step"])), "loss" not in record


def repeatable(record: Mapping[str, object]) -> dict[str, object]:
    """What of a record another computation of its step has, too: nothing of the clock."""
    return {
        name: value
        for name, value in record.items()
        if name not in OF_THE_CLOCK and not name.endswith(("_per_second", "_runtime"))
    }


def _finite(value: float) -> float | None:
    """Convert to strict JSON, which does not support nan."""
    return value if math.isfinite(value) else None


MARGINS = (0.12, 0.13, 0.86, 0.84)  # left, bottom, width, height; to lay it out costs half as much
WIDTHS = 40  # of half a smoothing window, in the length of the curve


@dataclass
class Plot(TrainerCallback):
    """Draws the training and the evaluation loss over the steps to ``path``: from the state's log
    history, so that a resumed run has one complete curve."""

    path: Path
    age: float = 30.0
    """Seconds that a picture is good for: training waits for each for a tenth of a second."""
    _drawn: float = field(default_factory=time.monotonic, init=False)

    def on_save(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Redraw, unless the last picture is still good."""
        if time.monotonic() - self._drawn >= self.age:
            self._draw(state)

    def on_train_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Draw the whole run."""
        self._draw(state)

    def _draw(self, state: TrainerState) -> None:
        draw(self.path, curves(state), "loss (nats per token)")
        self._drawn = time.monotonic()


Curves = dict[str, tuple[list[float], list[float]]]  # steps and values, by label


def curves(state: TrainerState) -> Curves:
    """The losses of ``metrics.jsonl``."""
    labels = {"training": "loss", "evaluation": "eval_loss"}
    return {label: curve for label, name in labels.items() if (curve := curve_of(state, name))[0]}


def curve_of(state: TrainerState, name: str) -> tuple[list[float], list[float]]:
    """The steps at which the metric ``name`` was logged, and its values."""
    records = [record for record in state.log_history if name in record]
    return [record["step"] for record in records], [record[name] for record in records]


def draw(path: Path, curves: Curves, unit: str) -> None:
    """Draw ``curves`` over the steps to ``path``; those of training with their means."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    axes = figure.add_axes(MARGINS)
    for label, (steps, values) in curves.items():
        is_raw = not label.startswith("eval") and len(steps) > 20
        axes.plot(steps, values, alpha=0.35 if is_raw else 1.0, label=label, linewidth=1.5)
        if is_raw:
            axes.plot(steps, smoothed(values), color=axes.lines[-1].get_color(), linewidth=1.8)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    try:
        write_aside(path, buffer.getvalue())
    except OSError as error:  # a picture is not worth stopping for
        logger.warning("could not draw %s", explain(error))


def smoothed(values: Sequence[float]) -> list[float]:
    """Centered means, which do not lag behind the curve. Towards both ends they are of fewer
    values, and the first and the last one are the values themselves."""
    width = max(1, len(values) // WIDTHS)
    means = []
    for at in range(len(values)):
        side = min(width, at, len(values) - 1 - at)
        near = [v for v in values[at - side : at + side + 1] if math.isfinite(v)]
        means.append(sum(near) / len(near) if near else math.nan)
    return means


_EVENTS = "events.out.tfevents.*"


def _put_before(paths: Sequence[Path], now: int) -> None:
    """Rename event files of the future, after the clock went back: TensorBoard reads files in the
    order of the times in their names, and the new one must be the last."""
    times = [path.name.split(".")[3] for path in paths]
    if any(text.isdecimal() and int(text) >= now for text in times):
        with raising(RunError, "tensorboard"):
            for number, (path, text) in enumerate(zip(paths, times, strict=True), -len(paths)):
                name = path.name.replace(text, f"{now + number:010d}", 1)
                rename(path, path.with_name(name))


@dataclass
class TensorBoard(TrainerCallback):
    """Writes every log as scalars; steps that a resume repeats replace the old ones."""

    folder: Path
    _writer: SummaryWriter | None = field(default=None, init=False)

    def on_init_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Detect a missing package before the first step, not at the first log."""
        try:
            import tensorboard  # noqa: F401
        except ImportError:
            raise RecipeError(
                f"train.report_to: tensorboard is not installed; {installation('tensorboard')}"
            ) from None

    def on_train_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Open the event file; ``purge_step`` hides what a killed run wrote after its last save.
        Without earlier event files, the log of the run so far is written first."""
        with self._dropped():
            self._open(state)

    def _open(self, state: TrainerState) -> None:
        from torch.utils.tensorboard import SummaryWriter

        _put_before(sorted(self.folder.glob(_EVENTS)), int(time.time()))
        is_new = not any(self.folder.glob(_EVENTS))
        purge = state.global_step + 1 if state.global_step else None
        self._writer = SummaryWriter(str(self.folder), purge_step=purge)
        for logs in state.log_history if is_new else ():
            if "step" in logs:
                self._write(self._writer, logs, int(logs["step"]))

    def on_log(
        self, args: Context, state: TrainerState, control: TrainerControl, logs: Metrics
    ) -> None:
        """``loss`` as ``train/loss``, ``eval_loss`` as ``eval/loss``."""
        if self._writer is not None:
            with self._dropped():
                self._write(self._writer, logs, state.global_step)
                self._writer.flush()

    def _write(self, writer: SummaryWriter, logs: Metrics, step: int) -> None:
        for name, value in logs.items():
            if name not in ("step", "epoch"):
                tag = f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"
                writer.add_scalar(tag, value, step)

    def on_train_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Close the file."""
        if self._writer is not None:
            with self._dropped():
                self._writer.close()
            self._writer = None

    @contextmanager
    def _dropped(self) -> Iterator[None]:
        """A disk that cannot hold the files does not stop a run: the log says so, once."""
        try:
            yield
        except (OSError, RuntimeError, RunError) as error:  # the package's thread passes on any
            reason = explain(error) if isinstance(error, OSError) else str(error)
            logger.warning("tensorboard: dropped: %s; metrics.jsonl has all figures", reason)
            self._writer = None
