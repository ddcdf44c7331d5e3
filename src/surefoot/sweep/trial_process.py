"""A trial that runs: ``surefoot train`` in a process of its own, and what its files say."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..checkpoint.disk.commit import committed
from ..errors import SKIPPED_STEPS, STOP_SIGNALS
from ..parallel.launch_environment import LAUNCHER
from ..storage.files import open_inside, read_inside
from ..storage.folder_lock import NAME as RUN_LOCK
from ..storage.folder_lock import is_held
from ..training.callbacks.launches import HEARTBEAT
from ..training.callbacks.training_process import LOG, start_training
from .files import METRICS, read_json
from .objective import Record

STOPPED = tuple(128 + number for number in STOP_SIGNALS)
ENDED = (0, SKIPPED_STEPS)
RESULTS, TRAINER_STATE = "all_results.json", "trainer_state.json"
_PATIENCE = 120.0  # seconds for a run to save
_COMMAND = "$ surefoot train "
_TAIL = 1 << 14  # bytes of a log in which its last lines are
_MAX_BYTES = 1 << 30  # of metrics


@dataclass
class RunFiles:
    """What the run of a trial has written so far."""

    folder: Path
    _stamp: tuple[int, int] | None = None
    _records: list[Record] = field(default_factory=list)

    def records(self) -> list[Record]:
        """The complete lines of ``metrics.jsonl``."""
        path = self.folder / METRICS
        try:
            stat = path.stat()
            if (stamp := (stat.st_size, stat.st_mtime_ns)) != self._stamp:
                data = read_inside(self.folder, METRICS, _MAX_BYTES)
                self._stamp, self._records = stamp, _parsed(data)
        except OSError:
            return []
        return self._records

    def total_steps(self) -> int | None:
        """The length of the run; None before its first step."""
        places = [self.folder / HEARTBEAT]
        if (self.folder / RESULTS).exists():  # a launch that finds the run complete takes no step
            places += [path / TRAINER_STATE for path in committed(self.folder)[-1:]]
        for place in places:
            total = (read_json(place) or {}).get("max_steps")
            if isinstance(total, int):
                return total
        return None

    def is_training(self) -> bool:
        """Whether a process trains in the folder."""
        return is_held(self.folder / RUN_LOCK) is True

    def last_words(self) -> str:
        """The error at the end of its log."""
        try:
            with open_inside(self.folder, LOG) as log:
                text = log.read_up_to(max(0, log.size - _TAIL), _TAIL).decode(errors="replace")
        except OSError:
            return ""
        text = text.rpartition(_COMMAND)[2]  # of this launch
        _, sign, error = text.rpartition("error:")
        lines = [line.strip() for line in (error if sign else text).splitlines() if line.strip()]
        return " ".join(lines) if sign else "".join(lines[-1:])


@dataclass(frozen=True)
class TrialProcess:
    """``surefoot train`` of one trial."""

    process: subprocess.Popen[bytes]

    def code(self) -> int | None:
        """Its exit code as a shell has it; None while it runs."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    def end(self) -> None:
        """Stop it, and wait until it has saved."""
        self.stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_PATIENCE)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Let it finish its step, save and exit."""
        if self.process.poll() is None:
            self.process.send_signal(number)


def start(recipe: Path, folder: Path, environment: Mapping[str, str]) -> TrialProcess:
    """Train ``recipe``, or resume its run in ``folder``. The process saves and ends if this one
    dies. Raises ``RunError``."""
    own = {**environment, LAUNCHER: str(os.getpid())}
    process = start_training(folder, ["train", str(recipe)], environment=own)
    return TrialProcess(process)


def environments(jobs: int, devices: Sequence[str], cores: int) -> list[dict[str, str]]:
    """What each of ``jobs`` trials at once may use: its share of the GPUs and of the cores.
    Trials share a GPU if there are fewer than trials."""
    found: list[dict[str, str]] = []
    for job in range(jobs):
        one: dict[str, str] = {}
        if devices and jobs > 1:
            size = len(devices) // jobs
            mine = devices[job * size : (job + 1) * size] or [devices[job % len(devices)]]
            one["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        if jobs > 1 and "OMP_NUM_THREADS" not in os.environ:
            one["OMP_NUM_THREADS"] = str(max(1, cores // jobs))
        found.append(one)
    return found


def why(code: int, words: str) -> str:
    """Why a trial failed."""
    if code == 128 + signal.SIGKILL:
        return "killed by SIGKILL, by hand or because memory was short"
    if code > 128:
        name = signal.Signals(code - 128).name if code - 128 in [*signal.Signals] else str(code)
        return f"killed by {name}"
    return words or f"ended with exit code {code}"


def _parsed(data: bytes) -> list[Record]:
    found: list[Record] = []
    for line in data.split(b"\n")[:-1]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and type(record.get("step")) is int:
            found.append(record)
    return found
