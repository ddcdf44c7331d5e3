"""Record of one launch in the folder of its run: when it began, and how it ended."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from ... import __version__
from ...model.pretrained.loading import device
from ...parallel.world import World
from ...recipe.recipe import Recipe
from ...training.callback import TrainerCallback
from ...training.callbacks.heartbeat import Heartbeat
from ...training.callbacks.launches import MAX_LINE, LaunchFiles
from ...training.trainer import Trainer
from ..from_python.outcome import Outcome
from .launch_reports import Reporting, reporting


@dataclass
class LaunchRecord:
    """What is known of the launch so far."""

    files: LaunchFiles
    callbacks: Sequence[TrainerCallback] = ()  # of rank 0
    end: dict[str, object] = field(default_factory=dict)  # as it is recorded
    _error: BaseException | None = None

    def follow(self, trainer: Trainer) -> Trainer:
        """The trainer is built: its saver knows the time that saves cost."""
        for callback in self.callbacks:
            if isinstance(callback, Heartbeat):
                callback.blocking_seconds = lambda: trainer.saver.blocking_seconds
        return trainer

    def ended(self, outcome: Outcome) -> Outcome:
        """Record that the launch has ended as it should."""
        if self.callbacks:
            is_cut_short = outcome.signal is not None and not outcome.state.is_complete
            facts = {} if outcome.signal is None else {"signal": outcome.signal.name}
            name = "stopped" if is_cut_short else "complete"
            self._record(outcome=name, step=outcome.global_step, **facts)
        return outcome

    @contextmanager
    def before_uploads(self) -> Iterator[None]:
        """Record an error inside the block at once, so that a store gets the record, too."""
        try:
            yield
        except BaseException as error:
            self._failed(error)
            raise

    def _failed(self, error: BaseException) -> None:
        if self.callbacks and error is not self._error:
            self._error = error
            words = str(error) or type(error).__name__
            kind = type(error).__name__
            self._record(outcome="failed", error=words[:MAX_LINE], kind=kind)

    def _record(self, **end: object) -> None:
        self.end = end
        self.files.end(**end)  # type: ignore[arg-type]


@contextmanager
def recorded(
    folder: Path, recipe: Recipe, world: World, start: Path | None
) -> Iterator[LaunchRecord]:
    """Write the begin of the launch, and an error inside the block, and report both; nothing on
    other ranks. Raises ``RecipeError`` if a tracker is missing."""
    with reporting(recipe, world) as reports, _written(folder, world, start, reports) as launch:
        yield launch


@contextmanager
def _written(
    folder: Path, world: World, start: Path | None, reports: Reporting
) -> Iterator[LaunchRecord]:
    files = LaunchFiles(folder)
    if not world.is_main:
        yield LaunchRecord(files)
        return
    resumed_from = start and start.name
    files.begin(ranks=world.size, device=device().type, resumed_from=resumed_from, **machine())
    record = LaunchRecord(files, [Heartbeat(files), *reports.callbacks])
    try:
        with record.before_uploads():
            yield record
    finally:
        reports.end = record.end


def machine() -> dict[str, object]:
    """What trains: the device, cores, memory in bytes, and versions."""
    found = device()
    is_gpu = found.type == "cuda"
    return {
        "device_name": torch.cuda.get_device_name(found) if is_gpu else platform.machine(),
        "cores": len(psutil.Process().cpu_affinity() or ()) if sys.platform == "linux" else None,
        "memory": psutil.virtual_memory().total,
        "surefoot": __version__,
        "torch": torch.__version__,
    }
