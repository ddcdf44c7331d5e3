"""What other processes learn of a run while it trains: its heartbeat in a file, and the events that
trackers and the webhook get; and their request that it stops.

Those are processes (``_tracker_process``) that are started, get events, and are ended in time.
The run never waits for one before its end.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from signal import SIGINT

from ...checkpoint.saving.saver import AsyncSaver
from ...errors import counted
from ...log import fell_back
from ...storage.child import Child
from ..arguments import Context
from ..callback import Metrics, TrainerCallback, TrainerControl, TrainerState
from ._progress import peak_memory
from .launches import LaunchFiles, take_stop_request

logger = logging.getLogger(__name__)
FINISH = 30.0  # seconds at the end of a launch, for all trackers together
PATIENCE = 120.0  # seconds for one call of a tracker


@dataclass
class TrackerProcess:
    """A tracker's process, which outlives a run that is killed, to say so."""

    name: str
    order: Mapping[str, object]
    environment: Mapping[str, str] = field(default_factory=dict)
    child: Child | None = None  # while there is one

    def start(self) -> None:
        """Start it. A tracker that cannot be started is dropped."""
        command = ["-m", f"{__package__}._tracker_process"]
        try:
            self.child = Child(command, talks=True, environment=self.environment, patience=0)
        except OSError as error:
            why = f"its process cannot be started: {error}"
            fell_back(f"{self.name} is dropped", why, "leaves metrics.jsonl alone")
        self.tell(tracker=self.name, finish=FINISH, patience=PATIENCE, **self.order)

    def tell(self, **event: object) -> None:
        """Send an event, without waiting."""
        is_deaf = self.child is not None and not self.child.send(event, wait=False)
        if is_deaf and self.child is not None and self.child.code is None:  # else it has said why
            self._drop("does not read what it is sent")

    def log_messages(self) -> None:
        """Log what it has said."""
        with contextlib.suppress(EOFError):
            for message in self.child.messages() if self.child is not None else ():
                level = logging.WARNING if message["is_warning"] else logging.INFO
                logger.log(level, "%s: %s", self.name, message["text"])

    def is_ended(self) -> bool:
        """Whether it has done its work, all it said is logged, and nothing remains of it."""
        if self.child is None:
            return True
        code = self.child.code
        self.log_messages()
        if code is None:
            return False
        if code not in (0, 1):  # 1: it has said why
            logger.warning("%s: dropped: its process ended with %d", self.name, code)
        self.child.end()
        self.child = None
        return True

    def give_up(self) -> None:
        """End it now."""
        if not self.is_ended():
            self._drop(f"not finished within {counted(round(FINISH), 'second')}")

    def _drop(self, why: str) -> None:
        self.log_messages()
        logger.warning("%s: dropped: %s; metrics.jsonl has all figures", self.name, why)
        if self.child is not None:
            self.child.end()
            self.child = None


def finish(processes: list[TrackerProcess], **end: object) -> None:
    """Let all of them finish, for a bounded time together."""
    for process in processes:
        process.tell(event="end", **end)
    deadline = time.monotonic() + FINISH
    try:
        while not all(process.is_ended() for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:  # also if the user does not wait
        for process in processes:
            process.give_up()


@dataclass
class Reports(TrainerCallback):
    """The metrics themselves are read from ``metrics.jsonl`` by each tracker's process."""

    processes: list[TrackerProcess]
    _num_skipped: int | None = field(default=None, init=False)

    def on_train_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Steps that earlier launches skipped do not count."""
        self._num_skipped = state.num_skipped

    def on_step_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Look for skipped steps."""
        self._note_skipped(state)

    def on_log(
        self, args: Context, state: TrainerState, control: TrainerControl, logs: Metrics
    ) -> None:
        """Log what trackers have said, each thing once."""
        self._note_skipped(state)
        for process in self.processes:
            process.log_messages()

    def _note_skipped(self, state: TrainerState) -> None:
        """A step or batch that was skipped has the first NaN or infinity of this launch."""
        if self._num_skipped is None or state.num_skipped <= self._num_skipped:
            return
        self._num_skipped = None
        for process in self.processes:
            process.tell(event="nan", step=state.global_step)


@dataclass
class Heartbeat(TrainerCallback):
    """Writes the step about once a second, and a line beside every log; looks as often whether
    ``surefoot stop`` has requested a stop."""

    files: LaunchFiles
    saver: AsyncSaver | None = None
    _first_step: int = 0
    _since: float = 0.0

    def on_train_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The first step is about to be taken."""
        self._first_step, self._since = state.global_step, time.time()
        self._beat(state, control, is_due=True)

    def on_step_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """One more step."""
        self._beat(state, control)

    def on_prediction_step(
        self, args: Context, state: TrainerState, control: TrainerControl
    ) -> None:
        """An evaluation is a sign of life, too."""
        self._beat(state, control)

    def on_log(
        self, args: Context, state: TrainerState, control: TrainerControl, logs: Metrics
    ) -> None:
        """What ``metrics.jsonl`` lacks, as no resume can repeat it."""
        if "loss" in logs:
            self.files.log(
                step=state.global_step,
                peak_memory=peak_memory(),
                **self._of_saves(),
            )

    def _of_saves(self) -> dict[str, float]:
        """What saves have taken in this launch."""
        if (saver := self.saver) is None:
            return {"save_blocking_seconds": 0.0}
        saves = {"num_saves": saver.num_committed, "save_seconds": round(saver.save_seconds, 6)}
        waited = round(saver.blocking_seconds, 6)
        return {"save_blocking_seconds": waited, **(saves if saver.num_committed else {})}

    def on_train_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The last step is taken."""
        self._beat(state, control, is_due=True)

    def _beat(self, state: TrainerState, control: TrainerControl, *, is_due: bool = False) -> None:
        facts = {"first_step": self._first_step, "since": self._since}
        is_written = self.files.beat(state.global_step, state.max_steps, is_due=is_due, **facts)
        # After the heartbeat: NFS looks up again whether a file exists once the folder has changed.
        if is_written and take_stop_request(self.files.folder):
            logger.warning("surefoot stop: finishing this step and saving")
            control.stop_signal = SIGINT
