"""A trial that runs: ``surefoot train`` in a process of its own, and what its files say."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...checkpoint.disk.commit import committed
from ...errors import SKIPPED_STEPS, STOP_SIGNALS
from ...storage.child import LAUNCHER
from ...storage.files import open_inside, parse_json, read_inside
from ...storage.folder_lock import NAME as RUN_LOCK
from ...storage.folder_lock import is_held
from ...training.callbacks.launches import HEARTBEAT
from ...training.callbacks.training_process import LOG, start_training
from .objective import Record

METRICS = "metrics.jsonl"
STOPPED = tuple(128 + number for number in STOP_SIGNALS)
ENDED = (0, SKIPPED_STEPS)
_RESULTS, _STATE = "all_results.json", "trainer_state.json"
_PATIENCE = 120.0  # seconds for a run to save
_TAIL = 1 << 14  # bytes of a log in which its last lines are
_MAX_BYTES, _MAX_METRICS = 32 << 20, 1 << 30


@dataclass
class ActiveTrial:
    """A trial that has a slot: it runs, or waits for the process of an earlier launch to end."""

    number: int
    folder: Path
    slot: int
    process: subprocess.Popen[bytes] | None = None
    is_pruned: bool = False
    is_waiting: bool = False
    num_reports: int = 0  # that are in the study
    _size: int = -1
    _records: list[Record] = field(default_factory=list)

    def begin(self, recipe: Path, environment: Mapping[str, str]) -> None:
        """Train ``recipe``, or resume its run. The process saves and ends if this one dies. Raises
        ``RunError``."""
        own = {**environment, LAUNCHER: str(os.getpid())}
        self.process = start_training(self.folder, ["train", str(recipe)], environment=own)

    def code(self) -> int | None:
        """Its exit code as a shell has it; None while it runs."""
        code = self.process.poll() if self.process else None
        return 128 - code if code is not None and code < 0 else code

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Let it finish its step, save and exit."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def end(self) -> None:
        """Stop it, and wait until it has saved."""
        self.stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.process is not None:
                self.process.wait(_PATIENCE)

    def is_training(self) -> bool:
        """Whether a process trains in the folder."""
        return is_held(self.folder / RUN_LOCK) is True

    def records(self) -> list[Record]:
        """The complete lines of ``metrics.jsonl``."""
        with contextlib.suppress(OSError):
            if (size := (self.folder / METRICS).stat().st_size) != self._size:
                lines = read_inside(self.folder, METRICS, _MAX_METRICS).split(b"\n")[:-1]
                self._size, self._records = size, [json.loads(line) for line in lines]
        return self._records

    def total_steps(self) -> int | None:
        """The length of the run; None before its first step."""
        places = [(self.folder, HEARTBEAT)]
        if (self.folder / _RESULTS).exists():  # a launch that finds the run complete takes no step
            places += [(path, _STATE) for path in committed(self.folder)[-1:]]
        for folder, name in places:
            with contextlib.suppress(OSError, ValueError):
                total = parse_json(read_inside(folder, name, _MAX_BYTES)).get("max_steps")
                if isinstance(total, int):
                    return total
        return None

    def why(self, code: int) -> str:
        """Why it failed: the error at the end of its log."""
        if code == 128 + signal.SIGKILL:
            return "killed by SIGKILL, by hand or because memory was short"
        if code > 128:
            return f"killed by signal {code - 128}"
        try:
            with open_inside(self.folder, LOG) as log:
                text = log.read_up_to(max(0, log.size - _TAIL), _TAIL).decode(errors="replace")
        except OSError:
            text = ""
        text = text.rpartition("$ surefoot train ")[2]  # of this launch
        _, sign, error = text.rpartition("error:")
        lines = [line.strip() for line in (error if sign else text).splitlines() if line.strip()]
        words = " ".join(lines if sign else lines[-1:])
        return words or f"ended with exit code {code}"
