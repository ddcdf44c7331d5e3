"""What feeds one tracker from ``metrics.jsonl``, in a worker process: W&B, SwanLab, Trackio,
MLflow, or a webhook. No torch.

So a tracker can neither slow the run nor stop it, nor ask for anything: it has no terminal. The run
sends lines of JSON: first what to do, later events. When they end, the run has ended, whatever
became of it, and this process ends within a bound, whatever the tracker does.

To add a tracker: write how its run is opened, add its line to ``SERVICES``, and its name to
``training.section.TrackerName``. A webhook gets a message when a launch ends or fails, when its
process dies, and at the first NaN; its URL comes from an environment variable and is written
nowhere.
"""

from __future__ import annotations

import json
import math
import os
import queue
import secrets
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeVar
from urllib.parse import urlsplit

from ...errors import RunError, counted
from ...storage.files import read_json, write_aside
from .launches import Follower, record, redacted

Facts = Mapping[str, object]
Event = dict[str, object]
Key = tuple[int, bool]  # step, and whether the line is of an evaluation
_T = TypeVar("_T")
METRICS = "metrics.jsonl"  # as in metric_files, which this process need not import
FOLDER = "trackers"
POLL = 0.3  # seconds between looks at metrics.jsonl


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker sees it."""

    folder: Path  # of the run
    files: Path  # a folder for the tracker's own
    id: str  # the same in every launch
    name: str
    project: str | None  # None: as the package's own environment variable says
    config: Facts  # the recipe
    is_offline: bool = False  # nothing is to leave the machine

    def project_or(self, usual: str | None) -> str:
        """The project that the recipe names, or the ``usual`` one of this machine."""
        return self.project or usual or "surefoot"


class Tracker(Protocol):
    """A run that is open in a tracker."""

    @property
    def place(self) -> str:
        """Where its curves are, or how they get there, in one clause."""

    def log(self, record: Mapping[str, float], step: int, line: int) -> None:
        """Add a record of ``metrics.jsonl``, which is line number ``line`` of all that were sent
        to this run, from 1."""

    def event(self, name: str, facts: Facts) -> None:
        """Something has happened to the run besides metrics, such as ``nan``."""

    def finish(self, outcome: str, facts: Facts) -> None:
        """The launch has ended: ``complete``, ``stopped``, ``failed`` or ``died``."""


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
        self.sent = Sent.read(self.folder / FOLDER / f"{self.name}.json")
        self.follower = self.sent.follower(self.folder / METRICS)

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
        if self.sent.is_another(lines):
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
    """What one tracker has. ``is_other`` and ``repeated`` are of this launch.

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

    def follower(self, metrics: Path) -> Follower:
        """Reads from the first line that was not sent."""
        return Follower(metrics, self.position, self.proof.encode())

    def is_another(self, lines: list[bytes]) -> bool:
        """Whether the whole file, in ``lines``, is of another curve."""
        return bool(lines and self.first) and lines[0].decode() != self.first

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


def key_of(row: dict[str, object]) -> Key:
    """Step and kind of a record; training comes before the evaluation of its step."""
    return int(str(row["step"])), "loss" not in row


@dataclass
class Service:
    """A run that its package can log to and finish, as Trackio's. It is opened with
    ``resume="allow"`` and an id of its own, so all launches are one curve."""

    run: Any
    place: str

    def log(self, record: Mapping[str, float], step: int, line: int) -> None:
        """Scalars of a step."""
        self.run.log(scalars(record), step=step)

    def event(self, name: str, facts: Facts) -> None:
        """It shows metrics only."""

    def finish(self, outcome: str, facts: Facts) -> None:
        """Write or send what remains."""
        self.run.finish()


def scalars(record: Mapping[str, float]) -> dict[str, float]:
    """``loss`` as ``train/loss``, ``eval_loss`` as ``eval/loss``, as the Hugging Face Trainer names
    them."""
    return {
        f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}": value
        for name, value in record.items()
        if name not in ("step", "epoch")
    }


def _opened(
    tracked: TrackedRun,
    variable: str,
    offline_modes: Mapping[str, str],
    opened: Callable[[str], Any],
    command: Callable[[Any], str],
) -> tuple[Any, str, bool]:
    """A run that is ``opened`` in the mode of the environment ``variable``, where it is, and
    whether it is online. Without a login, or where the service does not answer, it is written
    offline, and ``command`` sends it."""
    mode, why = os.environ.get(variable, "online").lower(), ""
    if mode == "disabled":
        return opened(mode), f"nowhere, as {variable} is disabled", False
    if not tracked.is_offline and mode not in offline_modes:
        try:
            return opened("online"), "", True
        except Exception as error:  # whatever the package raises, the run is not to miss its curve
            why = f", as it cannot be opened online ({error})"
    mode = offline_modes.get(mode, "offline")
    run = opened(mode)
    return run, f"{mode}{why}; `{command(run)}` sends it", False


STEP = "train/global_step"  # W&B's x axis, as the Hugging Face Trainer has it


@dataclass
class WandB(Service):
    """Weights & Biases."""

    def log(self, record: Mapping[str, float], step: int, line: int) -> None:
        """W&B's own step is the number of the line, which only grows: it drops a smaller one."""
        self.run.log({**scalars(record), STEP: step}, step=line)

    def finish(self, outcome: str, facts: Facts) -> None:
        """A launch that a signal stopped is not a failure."""
        self.run.finish(exit_code=0 if outcome in ("complete", "stopped") else 1)


def wandb(tracked: TrackedRun) -> WandB:
    """The run in Weights & Biases."""

    def opened(mode: str) -> Any:
        import wandb as package

        run: Any = package.init(
            project=tracked.project_or(os.environ.get("WANDB_PROJECT")),
            name=tracked.name,
            id=tracked.id,
            resume="allow",
            dir=str(tracked.files),
            config=dict(tracked.config),
            allow_val_change=True,
            mode=mode,
            settings=package.Settings(silent=True, console="off", disable_git=True),
        )
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP, step_sync=True)
        return run

    offline_modes = {"offline": "offline", "dryrun": "offline"}
    run, place, is_online = _opened(
        *(tracked, "WANDB_MODE", offline_modes, opened),
        lambda run: f"wandb sync {Path(run.dir).parent}",
    )
    return WandB(run, str(run.url) if is_online else place)


@dataclass
class SwanLab(Service):
    """SwanLab."""

    def finish(self, outcome: str, facts: Facts) -> None:
        """``success``, ``aborted`` or ``crashed``, with the error."""
        state = {"complete": "success", "stopped": "aborted"}.get(outcome, "crashed")
        error = str(facts.get("error") or outcome) if state == "crashed" else None
        self.run.finish(state=state, error=error)


def swanlab(tracked: TrackedRun) -> SwanLab:
    """The run in SwanLab."""

    def opened(mode: str) -> Any:
        import swanlab as package

        settings = package.Settings(interactive=False)
        return package.init(
            project=tracked.project_or(settings.project.name),
            name=tracked.name,
            id=tracked.id,
            resume="allow",
            log_dir=str(tracked.files),
            config=dict(tracked.config),
            mode=mode,
            reinit=True,
            settings=settings,
        )

    def command(_: Any) -> str:  # the folders' names begin with times
        return f"swanlab sync {max(tracked.files.glob('run-*'), default=tracked.files)}"

    offline_modes = {"offline": "offline", "local": "local"}
    run, place, is_online = _opened(tracked, "SWANLAB_MODE", offline_modes, opened, command)
    return SwanLab(run, str(getattr(run, "url", None) or "SwanLab") if is_online else place)


_ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


def trackio(tracked: TrackedRun) -> Service:
    """The run in Trackio: local files, or the Space or server that its own environment variables
    name. Trackio knows a run by its name, which therefore ends in a part of the id."""
    if tracked.is_offline:
        for name in _ELSEWHERE:
            os.environ.pop(name, None)
    import trackio as package

    project = tracked.project_or(os.environ.get("TRACKIO_PROJECT"))
    run = package.init(
        project,
        name=f"{tracked.name}-{tracked.id[:6]}",
        resume="allow",
        config=dict(tracked.config),
        embed=False,
        auto_log_cpu=False,
        auto_log_gpu=False,
    )
    space = next((os.environ[name] for name in _ELSEWHERE if os.environ.get(name)), None)
    shown = f"`trackio show --project {project}` shows it"
    return Service(run, f"{space}" if space else f"on this machine; {shown}")


_MOST_PARAMS, _LONGEST_PARAM = 100, 500  # of one request; what every version and server accepts


@dataclass
class MLflow(Service):
    """One run, whose id is MLflow's; ``run`` is the client."""

    run_id: str

    def log(self, record: Mapping[str, float], step: int, line: int) -> None:
        """Scalars of a step, in one request."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in scalars(record).items()]
        self.run.log_batch(self.run_id, metrics=metrics)

    def finish(self, outcome: str, facts: Facts) -> None:
        """Set the status."""
        status = {"complete": "FINISHED", "stopped": "KILLED"}.get(outcome, "FAILED")
        self.run.set_terminated(self.run_id, status)


def mlflow(tracked: TrackedRun) -> MLflow:
    """The run of an earlier launch in MLflow, by its tag, or a new one with the recipe as
    parameters: on the server of ``MLFLOW_TRACKING_URI``, or in the current folder."""
    address, is_default = _address(tracked)
    if "://" not in address or address.startswith("file:"):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # of this process alone
    from mlflow import MlflowClient
    from mlflow.entities import Param

    client = MlflowClient(tracking_uri=address)
    name = tracked.project_or(os.environ.get("MLFLOW_EXPERIMENT_NAME"))
    experiment = client.get_experiment_by_name(name)
    number = experiment.experiment_id if experiment else client.create_experiment(name)
    earlier = client.search_runs([number], f"tags.`surefoot.id` = '{tracked.id}'", max_results=1)
    if earlier:
        run_id = earlier[0].info.run_id
        client.update_run(run_id, status="RUNNING")
    else:
        tags = {"surefoot.id": tracked.id}
        run_id = client.create_run(number, tags=tags, run_name=tracked.name).info.run_id
        settings = flat(tracked.config).items()
        params = [Param(name, str(value)[:_LONGEST_PARAM]) for name, value in settings]
        for first in range(0, len(params), _MOST_PARAMS):
            client.log_batch(run_id, params=params[first : first + _MOST_PARAMS])
    why = " (MLFLOW_TRACKING_URI is not set)" if is_default else ""
    return MLflow(client, f"experiment {name} of {redacted(address)}{why}", run_id)


def _address(tracked: TrackedRun) -> tuple[str, bool]:
    """The store, and whether nobody has named it. MLflow's own default is a database in the
    current folder; mlflow-skinny has no package for it, so there it is a folder."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri and not (tracked.is_offline and uri.startswith(("http", "databricks"))):
        return uri, False
    here = Path.cwd()
    if find_spec("sqlalchemy") and find_spec("alembic"):
        return f"sqlite:///{here / 'mlflow.db'}", True
    return (here / "mlruns").as_uri(), True


def flat(config: Facts, before: str = "") -> dict[str, object]:
    """The settings of a recipe by their dotted paths."""
    settings: dict[str, object] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            settings |= flat(value, f"{before}{name}.")
        else:
            settings[f"{before}{name}"] = value
    return settings


TRIES, PAUSE, SECONDS = 3, 1.0, 8.0  # all within the time that a launch waits for its trackers
_MOST_ANSWER = 1 << 16
Payload = dict[str, object]
Shape = Callable[[Payload], Payload]
SHAPES: dict[str, Shape] = {  # by the end of a host's name: what it takes instead of the payload
    "hooks.slack.com": lambda payload: {"text": payload["text"]},
    "discord.com": lambda payload: {"content": payload["text"]},
    "open.feishu.cn": lambda payload: {"msg_type": "text", "content": {"text": payload["text"]}},
    "open.larksuite.com": lambda payload: {
        "msg_type": "text",
        "content": {"text": payload["text"]},
    },
    "oapi.dingtalk.com": lambda payload: {"msgtype": "text", "text": {"content": payload["text"]}},
    "qyapi.weixin.qq.com": lambda payload: {
        "msgtype": "text",
        "text": {"content": payload["text"]},
    },
}
_WORDS = {
    "complete": "is complete",
    "stopped": "was stopped and has saved",
    "failed": "has failed",
    "died": "has died: its process is gone and has said nothing",
    "nan": "has had a loss or gradient that is NaN or infinite",
}


@dataclass
class Webhook:
    """Knows the last record of the run, and sends it with each event."""

    url: str
    tracked: TrackedRun
    last: dict[str, object] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)  # events that were not taken

    @property
    def place(self) -> str:
        """The host alone: the rest of such a URL is a password."""
        return f"messages to {_host(self.url)}"

    def log(self, record: Mapping[str, float], step: int, line: int) -> None:
        """Remember the record."""
        self.last |= {"step": step, **{n: v for n, v in record.items() if n.endswith("loss")}}

    def event(self, name: str, facts: Facts) -> None:
        """Send it; what was not taken is part of the last message."""
        try:
            self._send(name, facts)
        except RunError:
            self.missed.append(name)

    def finish(self, outcome: str, facts: Facts) -> None:
        """Send how the launch has ended."""
        self._send(outcome, {**facts, "missed": self.missed} if self.missed else facts)

    def _send(self, name: str, facts: Facts) -> None:
        payload = payload_of(name, self.tracked, {**self.last, **facts})
        post(self.url, payload)


def webhook(tracked: TrackedRun) -> Webhook:
    """The URL is that of the environment."""
    return Webhook(os.environ["_SUREFOOT_WEBHOOK_URL"], tracked)


def payload_of(name: str, tracked: TrackedRun, facts: Facts) -> Payload:
    """What is sent: facts by name, and one text for people."""
    text = f"{tracked.name} {_WORDS[name]}"
    if "step" in facts:
        text += f", step {facts['step']}"
    losses = [f"{n} {v:.4g}" for n, v in facts.items() if isinstance(v, float) and "loss" in n]
    text += "".join(f", {loss}" for loss in losses[:2])
    if facts.get("error"):
        text += f": {facts['error']}"
    where = {"run": tracked.name, "folder": str(tracked.folder), "host": socket.gethostname()}
    json_facts = {
        n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in facts.items()
    }
    return {"event": name, **where, "time": time.time(), **json_facts, "text": text}


def post(url: str, payload: Payload) -> None:
    """Send ``payload`` in the shape that the host takes. Raises ``RunError`` without the URL."""
    data = json.dumps(shaped(url, payload)).encode()
    problem = ""
    for number in range(TRIES):
        time.sleep(PAUSE * number)
        problem, is_final = _tried(url, data)
        if not problem:
            return
        if is_final:
            break
    raise RunError(f"{_host(url)} has not taken the message: {problem}")


def shaped(url: str, payload: Payload) -> Payload:
    """``payload`` as the host of ``url`` takes it."""
    host = _host(url)
    shapes = (shape for end, shape in SHAPES.items() if host == end or host.endswith(f".{end}"))
    return next(shapes, lambda whole: whole)(payload)


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or "the webhook"
    except ValueError:
        return "the webhook"


def _tried(url: str, data: bytes) -> tuple[str, bool]:
    """What went wrong, or nothing; and whether trying again is useless."""
    headers = {"Content-Type": "application/json", "User-Agent": "surefoot"}
    try:
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return _complaint(answer.read(_MOST_ANSWER)), True
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}", error.code < 500 and error.code not in (408, 429)
    except OSError as error:
        return str(getattr(error, "reason", None) or error), False
    except ValueError:  # its text would repeat the URL
        return "the URL is not one", True


def _complaint(body: bytes) -> str:
    """Feishu, DingTalk and WeCom answer 200 with a code of their own."""
    try:
        answer = json.loads(body)
    except ValueError:
        return ""
    answer = answer if isinstance(answer, dict) else {}
    code = answer.get("errcode") or answer.get("code")
    return (
        f"{answer.get('errmsg') or answer.get('msg')} ({code})"
        if isinstance(code, int) and code
        else ""
    )


SERVICES: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": wandb,
    "swanlab": swanlab,
    "trackio": trackio,
    "mlflow": mlflow,
    "webhook": webhook,
}


if __name__ == "__main__":
    main()
