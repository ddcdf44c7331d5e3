"""One launch of a run: its record in the run's folder, its trackers, and what it comes to."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from signal import Signals

import psutil
import torch

from .. import __version__
from ..checkpoint.disk.retention import origin_of
from ..checkpoint.saving.preparation import versions
from ..errors import RecipeError
from ..model.loading import device
from ..network.early import check_packages
from ..parallel.world import World
from ..storage.cgroups import usable_cores
from ..training.callback import TrainerCallback, TrainerState
from ..training.callbacks.launches import MAX_LINE, LaunchFiles, redacted
from ..training.callbacks.trackers import Heartbeat, Reports, TrackerProcess, finish
from ..training.section import TrainSection
from ..training.trainer import Trainer
from .surroundings import (
    EQUAL,
    ROUNDING,
    VARIABLES,
    differences,
    hash_of_code,
    launch_of,
    launches_in,
    verdict,
)

logger = logging.getLogger(__name__)


@contextmanager
def recorded(
    folder: Path,
    section: TrainSection,
    settings: Mapping[str, object],
    world: World,
    start: Path | None,
    *,
    command: str | None,
    began: float,
) -> Iterator[LaunchRecord]:
    """Record the launch inside the block in ``folder``, which is locked: its begin, its end, an
    error; and report it with the ``settings`` of the recipe to the trackers of ``section``. Nothing
    on other ranks. Raises ``RecipeError`` if a tracker or the webhook's URL is missing."""
    world.on_main(partial(_check_reports, section))
    files = LaunchFiles(folder, began, world.progress)
    if not world.is_main:
        yield LaunchRecord(files)
        return
    trackers = _trackers(section, settings)
    for tracker in trackers:
        tracker.start()
    reports = [Reports(trackers)] if trackers else []
    record = LaunchRecord(files, [Heartbeat(files), *reports])
    try:
        facts = {"ranks": world.size, "device": device().type, "resumed_from": start and start.name}
        if start is not None and start.parent.resolve() != folder.resolve():
            facts["resumed_from_path"] = str(start.absolute())
        files.begin(command, **facts, **machine())
        with record.before_uploads():
            yield record
    finally:  # errors may name what they were given
        end = {n: redacted(v) if isinstance(v, str) else v for n, v in record.end.items()}
        finish(trackers, **end)


@dataclass
class LaunchRecord:
    """What is known of the launch so far."""

    files: LaunchFiles
    callbacks: Sequence[TrainerCallback] = ()  # of rank 0
    end: dict[str, object] = field(default_factory=lambda: {"outcome": "failed"})
    _error: BaseException | None = None
    _state: TrainerState | None = None  # once there is a trainer

    def follow(self, trainer: Trainer, settings: Mapping[str, object]) -> Trainer:
        """The trainer is built: its saver knows the time that saves cost. Record its surroundings
        with the ``settings`` that may differ between launches, and say what a resume changes."""
        self._state = trainer.state
        if self.callbacks:
            now, step = observed(trainer, settings), trainer.state.global_step
            changed = _changed(trainer, now) if step else {}
            self.files.surroundings(start=step, **now, **changed)
        for callback in self.callbacks:
            if isinstance(callback, Heartbeat):
                callback.saver = trainer.saver
        return trainer

    def ended(self, state: TrainerState, signal: Signals | None) -> None:
        """Record that the launch has ended as it should, or because of ``signal``."""
        if self.callbacks:
            outcome = "complete" if signal is None or state.is_complete else "stopped"
            facts = {} if signal is None else {"signal": signal.name}
            self._record(outcome=outcome, step=state.global_step, **facts)

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
            step = {} if self._state is None else {"step": self._state.global_step}
            self._record(outcome="failed", error=words[:MAX_LINE], kind=kind, **step)

    def _record(self, **end: object) -> None:
        self.end = end
        self.files.end(**end)  # type: ignore[arg-type]


def machine() -> dict[str, object]:
    """What trains: the device, cores, memory in bytes, and versions."""
    accelerator = device()
    is_gpu = accelerator.type == "cuda"
    return {
        "device_name": torch.cuda.get_device_name(accelerator) if is_gpu else platform.machine(),
        "cores": usable_cores(),
        "memory": psutil.virtual_memory().total,
        "surefoot": __version__,
        "torch": torch.__version__,
    }


def observed(trainer: Trainer, settings: Mapping[str, object]) -> dict[str, object]:
    """The surroundings of a launch on this rank, once ``trainer`` is built: what bits depend on
    beside its recipe, base and rows; and the ``settings`` that may differ between launches."""
    is_gpu = device().type == "cuda"
    here: dict[str, object] = {
        "ranks": trainer.world.size,
        "threads": torch.get_num_threads(),
        "processor": f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "code": hash_of_code(),
        "versions": versions(),
        "variables": {n: v for n, v in sorted(os.environ.items()) if n.startswith(VARIABLES)},
        "settings": settings,
    }
    if is_gpu:
        driver = Path("/proc/driver/nvidia/version")
        here["device"] = torch.cuda.get_device_name(device())
        here["driver"] = driver.read_text().partition("\n")[0] if driver.is_file() else None
    examples = trainer.windows.loader.order.examples
    rows = {"training": getattr(examples, "fingerprint", None)}  # of a stream: none before its end
    evals = {
        name: getattr(each.examples, "fingerprint", None) for name, each in trainer.evals.items()
    }
    here["data"] = {**rows, "evaluation": evals}
    plain: dict[str, object] = json.loads(json.dumps(here, default=str))  # as it is recorded
    return plain


def _processor() -> str:
    """The model of the processor, as the system names it."""
    with suppress(OSError):
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
        if names:
            return str(names[0])
    return platform.processor() or platform.machine()


def _changed(trainer: Trainer, now: Mapping[str, object]) -> dict[str, object]:
    """What differs from the launch that has saved the state of ``trainer``, and what that means for
    the steps from here on; said, and for the record."""
    start, step = trainer.saver.resumed_from, trainer.state.global_step
    run = Path() if start is None else Path(start).parent
    if (origin := origin_of(run)) is not None and origin[1] == step:
        run = Path(origin[0])
    before = launch_of(launches_in(run), step)
    if before is None or not before.surroundings:
        return {}
    found = differences(before.surroundings, now)
    is_exact = device().type != "cuda" or trainer.section.deterministic
    means, changed = verdict(found) if is_exact else ROUNDING, [str(each) for each in found]
    if means == EQUAL and run.resolve() != trainer.section.folder.resolve():
        means = "by the settings of this run"  # of which its own comparison speaks
    what = "; ".join(changed) or "nothing that bits depend on"
    logger.info("changed since step %d: %s; from here on %s", step, what, means)
    return {"since": step, "changed": changed, "verdict": means}


def _check_reports(section: TrainSection) -> None:
    """Raise ``RecipeError`` if a tracker is not installed, or the webhook has no URL."""
    for name in section.report_to:
        check_packages([name], f"train.report_to: {name}")
    if section.webhook is not None and not os.environ.get(section.webhook):
        raise RecipeError(
            f"train.webhook: the environment variable {section.webhook} is not set; set it to the "
            "URL of the webhook, or remove train.webhook"
        )


def _trackers(section: TrainSection, settings: Mapping[str, object]) -> list[TrackerProcess]:
    order: dict[str, object] = {
        "folder": str(section.folder.absolute()),
        "run_name": section.run_name or section.folder.absolute().name,
        "project": section.project,
        "is_offline": section.report_offline,
    }
    config = json.loads(redacted(json.dumps(settings, default=str)))
    trackers = [
        TrackerProcess(name, {**order, "config": config})
        for name in section.report_to
        if name != "tensorboard"  # which is a callback: it writes files itself
    ]
    url = os.environ.get(section.webhook) if section.webhook else None
    if url:
        variables = {"_SUREFOOT_WEBHOOK_URL": url}
        trackers.append(TrackerProcess("webhook", {**order, "is_eager": True}, variables))
    return trackers
