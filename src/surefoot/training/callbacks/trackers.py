"""The processes of trackers and of the webhook: started, told what happens to a run, and ended in
time. The run never waits for one before its end.

``tracker_services`` is what such a process runs.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import counted
from ...storage.child import Child
from ..callback import Context, Metrics, TrainerCallback, TrainerControl, TrainerState

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
        command = ["-m", f"{__package__}.tracker_services"]
        try:
            self.child = Child(command, talks=True, environment=self.environment, patience=0)
        except OSError as error:
            logger.warning("%s: cannot be started: %s", self.name, error)
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
