"""The process that feeds one tracker or webhook from ``metrics.jsonl``. No torch.

So a tracker can neither slow the run nor stop it, nor ask for anything: it has no terminal. The run
(``trackers.TrackerProcess``) sends lines of JSON: first what to do, later events. When they end,
the run has ended, whatever became of it, and this process ends within a bound, whatever the tracker
does.

To add a tracker: write in ``_tracker_services`` how its run is opened, add its line to
``SERVICES``, and its name to ``training.section.TrackerName``.
"""

from __future__ import annotations

import json
import math
import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TextIO, TypeVar

from ...errors import counted
from ...storage.files import read_json, write_aside
from ._tracker_services import TrackedRun, Tracker, mlflow, swanlab, trackio, wandb
from ._webhook import webhook
from .launches import Follower, record, redacted

Event = dict[str, object]
_T = TypeVar("_T")
METRICS = "metrics.jsonl"  # as in metric_files, which this process need not import
FOLDER = "trackers"
POLL = 0.3  # seconds between looks at metrics.jsonl
SERVICES: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": wandb,
    "swanlab": swanlab,
    "trackio": trackio,
    "mlflow": mlflow,
    "webhook": webhook,
}


def main() -> None:
    """Do what the first line on standard input says."""
    say = _channel()
    order: Event = json.loads(sys.stdin.readline() or "{}")
    if not order:
        return
    events: queue.Queue[Event] = queue.Queue()
    feeder = Feeder(str(order["tracker"]), order, say)
    seconds, patience = float(str(order["finish"])), float(str(order["patience"]))
    threading.Thread(target=_listen, args=(sys.stdin, events, seconds), daemon=True).start()
    threading.Thread(target=_watch, args=(feeder, patience), daemon=True).start()
    try:
        if order.get("is_eager"):
            feeder.open()
        feeder.follow(events)
    except (Exception, SystemExit) as error:  # whatever the package raises
        reason = redacted(str(error).strip() or type(error).__name__)
        say(f"dropped: {reason[:600]}; {METRICS} has all figures", True)
        os._exit(1)
    os._exit(0)  # the package's own hooks at exit may wait for a network


def _channel() -> Callable[[str, bool], None]:
    """What this process says to the run; what the package prints is dropped."""
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)

    def say(text: str, is_warning: bool) -> None:
        try:
            out.write(json.dumps({"text": redacted(text), "is_warning": is_warning}) + "\n")
        except OSError:  # the run is gone
            return

    return say


def _listen(lines: TextIO, events: queue.Queue[Event], seconds: float) -> None:
    """Pass events on. After the last one, or after the death of the run, time is limited."""
    outcome: Event = {"event": "end", "outcome": "died"}
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:  # cut in the middle
            break
        if event.get("event") == "end":
            outcome = event
            break
        events.put(event)
    events.put(outcome)
    time.sleep(seconds)
    os._exit(1)


def _watch(feeder: Feeder, patience: float) -> None:
    """End the process if the tracker does not answer."""
    # A call that hangs inside a package can be ended in no other way (docs/decisions/0077): so each
    # tracker has a process of its own.
    while True:
        time.sleep(min(1.0, patience / 4))
        since = feeder.busy_since
        if since is not None and time.monotonic() - since > patience:
            waited = counted(round(patience), "second")
            text = f"dropped: it has not answered for {waited}; {METRICS} has all figures"
            feeder.say(text, True)
            os._exit(1)


@dataclass
class Feeder:
    """Sends the lines of one run to one tracker."""

    name: str
    order: Event
    say: Callable[[str, bool], None]
    busy_since: float | None = None  # of the tracker's call that runs
    sent: Sent = field(init=False)
    follower: Follower = field(init=False)
    tracker: Tracker | None = None  # opened with the first line, so none is opened for nothing

    def __post_init__(self) -> None:
        self.folder = Path(str(self.order["folder"]))
        self.sent = sent = Sent.read(self.folder / FOLDER / f"{self.name}.json")
        self.follower = Follower(self.folder / METRICS, sent.position, sent.proof.encode())

    def open(self) -> Tracker:
        """Open the run in the tracker, and say where it is."""
        files = self.folder / FOLDER / self.name
        files.mkdir(parents=True, exist_ok=True)
        config, project = self.order.get("config"), self.order.get("project")
        tracked = TrackedRun(
            folder=self.folder,
            files=files,
            id=self.sent.id,
            name=str(self.order["run_name"]),
            project=None if project is None else str(project),
            config=config if isinstance(config, dict) else {},
            is_offline=bool(self.order.get("is_offline")),
        )
        self.tracker = tracker = self.watched(lambda: SERVICES[self.name](tracked))
        self.sent.write()  # the id, before anything is sent
        self.say(tracker.place, False)
        return tracker

    def follow(self, events: queue.Queue[Event]) -> None:
        """Send lines and events until the launch has ended."""
        while True:
            try:
                event = events.get(timeout=POLL)
            except queue.Empty:
                event = {}
            self.send()
            name = str(event.pop("event", ""))
            if name == "end":
                self._finish(str(event.pop("outcome", "died")), event)
                return
            if name and self.tracker is not None:
                self.watched(partial(self.tracker.event, name, event))

    def send(self) -> None:
        """Send the records that the tracker lacks."""
        was_at_start = self.follower.position == 0
        lines, is_other = self.follower.read()
        if lines and (is_other or was_at_start):
            self._compare(lines)
        for row in self.sent.new(lines):
            numbers = {n: math.nan if v is None else v for n, v in row.items()}
            values = {n: v for n, v in numbers.items() if isinstance(v, int | float)}
            step, line = int(str(row["step"])), self.sent.lines + 1
            tracker = self.tracker or self.open()
            self.watched(partial(tracker.log, values, step, line))
        if lines:
            self.sent.position = self.follower.position
            self.sent.proof = self.follower.proof.decode(errors="replace")
            self.sent.write()

    def watched(self, call: Callable[[], _T]) -> _T:
        """A call of the tracker, whose time is watched."""
        self.busy_since = time.monotonic()
        try:
            return call()
        finally:
            self.busy_since = None

    def _finish(self, outcome: str, facts: Event) -> None:
        if self.tracker is not None:
            self.watched(partial(self.tracker.finish, outcome, facts))
            self.tracker = None

    def _compare(self, lines: list[bytes]) -> None:
        """The file is read from its start: it was new, or was cut because steps were repeated with
        other values."""
        last = record(lines[-1])
        if self.sent.first and lines[0].decode() != self.sent.first:
            self._finish("stopped", {})
            self.sent = Sent(self.sent.path)
            self.say("a run from scratch is another curve: a new one begins", False)
        elif last is not None and key_of(last) < (self.sent.step, self.sent.is_eval):
            self.say(
                f"steps up to {self.sent.step} are repeated with other values; it keeps those that "
                f"it got first, {METRICS} has the last",
                False,
            )


@dataclass
class Sent:
    """What one tracker has, in a file, so that the next launch continues its curve.

    A resumed run repeats steps. If their lines in ``metrics.jsonl`` are the same, nothing is sent
    twice, as the position in the file is known. If they differ, the tracker keeps what it got
    first, since none of them can take back a value; a run whose first line differs is another
    curve.
    """

    path: Path
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    step: int = -1
    is_eval: bool = False
    lines: int = 0
    first: str = ""
    position: int = 0
    proof: str = ""

    @classmethod
    def read(cls, path: Path) -> Sent:
        """The file, or that of a run that the tracker does not have yet."""
        try:
            content = read_json(path)
            sent = cls(path, **{name: content[name] for name in _FIELDS})
        except (OSError, ValueError, TypeError, KeyError):
            return cls(path)
        return sent if sent.lines else cls(path, sent.id)

    def write(self) -> None:
        """Write the file. Raises ``OSError``."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {name: value for name, value in asdict(self).items() if name != "path"}
        write_aside(self.path, json.dumps(content).encode())

    def new(self, lines: list[bytes]) -> Iterator[dict[str, object]]:
        """The records that the tracker lacks; each counts as sent once the next is requested."""
        for line in lines:
            row = record(line)
            if row is None or key_of(row) <= (self.step, self.is_eval):
                continue
            yield row
            self.step, self.is_eval = key_of(row)
            self.lines += 1
            self.first = self.first or line.decode()


_FIELDS = ("id", "step", "is_eval", "lines", "first", "position", "proof")


def key_of(row: dict[str, object]) -> tuple[int, bool]:
    """The step of a record, and whether it is of an evaluation, which comes after training."""
    return int(str(row["step"])), "loss" not in row


if __name__ == "__main__":
    main()
