"""Watchdog process of one rank: notices that the rank makes no progress, finds out with the
watchdogs of the other ranks which rank is to blame, reports it, and ends the run.

It is run by its path and imports nothing of Surefoot, so that it starts in 0.1 s. It reads the
marks that the rank leaves in shared memory, and what the system knows of its threads. That of rank
0 judges: the others send it what they see once a second. So an answer needs neither the
interpreter of a rank that hangs, nor a disk, nor the process group.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import mmap
import os
import re
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# The marks: 64 numbers (float64), then the rows as text. Stacks are appended behind them.
SIZE, TEXT_AT, PHASES_AT = 4096, 512, 8
MARKS, PHASE, STEP, MICRO_BATCH, TEXT_LENGTH, TOKENS, RATE = range(7)
SLOWEST, TOTAL, PROCESSOR, ALLOWED = range(4)  # of each phase, from PHASES_AT on
PHASES = (
    *("starting", "preparing a batch", "training", "evaluating", "saving", "running callbacks"),
    *("ending", "uploading"),
)
STARTING, DATA, TRAINING, EVALUATING, SAVING, CALLBACKS, ENDING, UPLOADING = range(len(PHASES))
# Seconds without a mark, with `parallel.timeout: auto`. A save may wait 15 minutes for its writer
# process (docs/how-to/resume.md), and one call of a callback or an upload may be long.
LEAST = (1800.0, 120.0, 120.0, 600.0, 3600.0, 1800.0, 1800.0, 6 * 3600.0)
FIRST = 1800.0  # as long as no step of a kind has been taken
FACTOR = 10.0  # times the slowest one so far
MOVES_BYTES = (STARTING, SAVING, UPLOADING)  # where bytes that are read or written are progress
LEAST_BYTES = 1 << 16  # a second; less may be a line of the log
DUMP = 41  # a signal that is free for programs
REPORT = "hang.json"  # in the folder of the run
_SILENT = 12.0  # ticks without a word from another watchdog
_OTHERS_END = 2.0  # seconds after the rank to blame, so that a launcher sees that one fail first
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_THREAD = re.compile(r"(?:Current t|T)hread (0x[0-9a-f]+)")
# What waits for other ranks, or for a device on which their collectives run: what is called in a
# frame with this name (parallel/progress.py), and what torch itself calls: FSDP, DTensor.
MARK = "wait_for_ranks"
_WAITS = re.compile(r"torch/distributed/(?!tensor/)|torch/cuda/\S+ synchronize")
_DEBUGGER = re.compile(r"/(bdb|pdb)\.py|pydevd|debugpy")
_IDLE = re.compile(r"/(threading|queue|selectors|socket)\.py|concurrent/futures|torch/_inductor")
_LIBRARY = re.compile(r"/site-packages/|/lib/python\d|^<")
Message = dict[str, Any]


@dataclass
class View:
    """What the watchdog of a rank sees of it."""

    rank: int
    host: str
    pid: int = 0
    phase: str = PHASES[STARTING]
    step: int = 0
    micro_batch: int = -1
    rows: str = ""
    idle: float = 0.0  # seconds since its last mark
    working: float = 0.0  # of these, since it was last seen to wait for other ranks
    limit: float = FIRST
    state: str = ""  # running, waiting, stopped, blocked, debugged, ended, silent; "" if not needed
    place: str = ""  # where it is
    collective: str = ""  # where it waits, without line numbers of what called it
    stack: str = ""
    unheard: float = 0.0  # seconds since its watchdog has sent this

    @property
    def is_late(self) -> bool:
        """Whether it has made no progress for too long."""
        return self.idle > self.limit


def blamed(views: Sequence[View]) -> list[View]:
    """The ranks that hold up the run; empty as long as that is not known, or none does."""
    late = [view for view in views if view.is_late and view.state not in ("ended", "silent")]
    if not late or any(view.state == "debugged" for view in views):
        return []
    if all(view.state == "stopped" for view in views):
        return []  # somebody has suspended the run
    # A rank that waited for others gets its full time again: what held it up may be over.
    busy = [v for v in late if v.state in ("running", "blocked", "stopped") and v.working > v.limit]
    if busy:
        return busy
    if any(view.state == "waiting" for view in late):
        if gone := [view for view in views if view.state in ("ended", "silent", "stopped")]:
            return gone
        # Rank 0 may do for all what takes hours (docs/decisions/0030): while it is not late itself,
        # those that wait for it have not lost it.
        if all(view.is_late and view.state == "waiting" for view in views):
            return _at_odds(views)
    return []


def _at_odds(views: Sequence[View]) -> list[View]:
    """Of ranks that all wait for each other, those that wait elsewhere than most; all of them if
    none stands out."""
    steps = {view.step for view in views}
    if len(steps) > 1:
        return [view for view in views if view.step == min(steps)]
    places = Counter(view.collective for view in views)
    (most, count), *_ = places.most_common()
    odd = [view for view in views if view.collective != most]
    return odd if odd and 2 * count > len(views) else list(views)


def limit_of(phase: int, slowest: float, minutes: float | None, allowed: float = 0.0) -> float:
    """Seconds that a rank may need until its next mark. ``slowest``: the longest time that it has
    spent in this phase at once, or needs for its tokens at its slowest rate; 0: the phase is its
    first of this kind. ``allowed``: what the run takes for normal, at least."""
    if minutes is not None and phase != UPLOADING:
        return 60 * minutes
    return max(LEAST[phase], allowed if slowest else FIRST, FACTOR * slowest)


class Watch:
    """A rank of this machine, which is the parent of this process."""

    def __init__(self, order: Message) -> None:
        self.pid, self.thread, self.ident = order["pid"], order["thread"], order["ident"]
        self.exit: int = order["exit"]
        self.minutes: float | None = order["minutes"]
        self._file = os.open(order["memory"], os.O_RDWR)
        memory = mmap.mmap(self._file, SIZE, access=mmap.ACCESS_READ)
        self._bytes = memoryview(memory)
        self._words = self._bytes[:TEXT_AT].cast("d")
        self._marks, self._moved = -1.0, 0
        self._looked = 0.0  # ``view.idle`` when its threads were last looked at
        self.view = View(order["rank"], socket.gethostname(), self.pid)

    def look(self, seconds: float) -> None:
        """Bring ``view`` up to date, ``seconds`` after the last time."""
        view, words = self.view, self._words
        phase = int(words[PHASE])
        if words[MARKS] != self._marks or (phase in MOVES_BYTES and self._moves_bytes(seconds)):
            self._marks, view.idle, view.working, self._looked = words[MARKS], 0.0, 0.0, 0.0
            view.state = view.place = view.collective = view.stack = ""
        else:
            view.idle, view.working = view.idle + seconds, view.working + seconds
        view.phase, view.step = PHASES[phase], int(words[STEP])
        view.micro_batch = int(words[MICRO_BATCH])
        view.rows = str(self._bytes[TEXT_AT : TEXT_AT + int(words[TEXT_LENGTH])], "utf-8", "ignore")
        at = PHASES_AT + 4 * phase
        slowest, allowed = words[at + SLOWEST], words[at + ALLOWED]
        if phase == TRAINING:  # a row may have a hundred times the tokens of those before it
            slowest = max(slowest, min(FIRST / FACTOR, words[RATE] * words[TOKENS]))
        view.limit = limit_of(phase, slowest, self.minutes, allowed)
        is_due = view.idle - self._looked > 0.2 * view.limit and view.idle > 0.8 * view.limit
        if is_due or self._looked < view.limit < view.idle:
            self._looked = view.idle
            self._examine()
        if view.state == "waiting":
            view.working = view.idle - self._looked

    def _moves_bytes(self, seconds: float) -> bool:
        before, self._moved = self._moved, sum(map(_num_bytes, [self.pid, *self._children()]))
        return abs(self._moved - before) > LEAST_BYTES * seconds

    def _children(self) -> Iterable[int]:
        for path in Path(f"/proc/{self.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                yield from (int(pid) for pid in path.read_text().split() if int(pid) != os.getpid())

    def _examine(self) -> None:
        """Find out what the rank does: from the system, and from the stacks of its threads."""
        view, task = self.view, Path(f"/proc/{self.pid}/task/{self.thread}")
        try:
            letter = (task / "stat").read_text().rpartition(")")[2].split()[0]
            is_traced = "\nTracerPid:\t0\n" not in (task / "status").read_text()
        except OSError:
            letter, is_traced = "Z", False
        states = {"T": "stopped", "t": "debugged", "D": "blocked", "Z": "ended", "X": "ended"}
        view.state = "debugged" if is_traced else states.get(letter, "running")
        if view.state in ("stopped", "ended"):
            return
        if view.state == "blocked":
            with contextlib.suppress(OSError):  # the function of the kernel
                view.place = f"{(task / 'wchan').read_text()} of the kernel"
        view.stack = self._stack() or view.stack
        threads = _threads(view.stack)
        frames = threads.pop(self.ident, [])
        if not frames:
            return
        # The thread of a device may wait, for which the one of the backward pass waits.
        every = [frames, *(threads.values() if "torch/autograd/graph.py" in frames[0][0] else ())]
        waits = [wait for wait in map(_wait, every) if wait is not None]
        frames = _unmarked(frames)
        view.place = _place(frames, threads)
        inner = [f"{file} {function}" for file, _, function in frames]
        if any(map(_DEBUGGER.search, inner)):
            view.state = "debugged"
        elif waits:
            view.state = "waiting"
            callers = [text for text in inner if not re.search("torch/|contextlib", text)]
            view.collective = " < ".join([waits[0], *callers[:2]])

    def _stack(self) -> str:
        """The stacks of all threads; empty if the rank cannot write them any more."""
        os.ftruncate(self._file, SIZE)
        if not self.send(DUMP):
            return ""
        size, deadline = 0, time.monotonic() + 3.0
        while time.monotonic() < deadline:
            time.sleep(0.1)
            before, size = size, os.fstat(self._file).st_size
            if size == before > SIZE:
                break
        return os.pread(self._file, 1 << 17, SIZE).decode(errors="replace")

    def send(self, number: int) -> bool:
        """Send a signal to the rank; False if it is not the parent of this process any more."""
        if os.getppid() != self.pid:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        return True

    def end(self) -> None:
        """End the rank by the signal that is its exit code, or however it can be ended."""
        children = list(self._children())
        self.send(self.exit)
        self.send(signal.SIGCONT)  # a stopped process receives nothing else
        deadline = time.monotonic() + 3.0
        while os.getppid() == self.pid and time.monotonic() < deadline:
            time.sleep(0.02)
        self.send(signal.SIGKILL)
        for pid in children:  # a stopped one would never receive that its parent has died
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGCONT)


def _num_bytes(pid: int) -> int:
    """Bytes that a process has read and written, with those of files that are mapped."""
    try:
        counters = dict(
            line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines()
        )
        faults = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[9])
    except (OSError, ValueError):
        return 0
    return int(counters["rchar"]) + int(counters["wchar"]) + faults * mmap.PAGESIZE


Frame = tuple[str, str, str]  # file, line, function


def _threads(stack: str) -> dict[str, list[Frame]]:
    """The frames of each thread, innermost first."""
    threads: dict[str, list[Frame]] = {}
    frames: list[Frame] = []
    for line in stack.splitlines():
        if header := _THREAD.match(line):
            frames = threads.setdefault(header[1], [])
        elif frame := _FRAME.match(line):
            frames.append((frame[1], frame[2], frame[3]))
    return threads


def _wait(frames: Sequence[Frame]) -> str | None:
    """What a thread waits for other ranks in; None if it does something else."""
    inner = [f"{file} {function}" for file, _, function in _unmarked(frames)]
    if len(inner) < len(frames):
        return inner[0]
    return next(filter(_WAITS.search, inner[:3]), None)


def _unmarked(frames: Sequence[Frame]) -> list[Frame]:
    return [frame for frame in frames if frame[2] != MARK]


def _place(frames: Sequence[Frame], others: dict[str, list[Frame]]) -> str:
    """Where a thread is: its innermost frame, and the innermost one that is not of a library. If it
    waits for another thread, where those are that do something."""

    def named(frame: Frame) -> str:
        return f"{frame[0]}:{frame[1]} in {frame[2]}"

    near = next((f for f in frames if "/surefoot/" in f[0] or not _LIBRARY.search(f[0])), frames[0])
    parts = [named(frame) for frame in dict.fromkeys((frames[0], near))]
    if _IDLE.search(frames[0][0]):
        busy = [f for f in others.values() if f and not _IDLE.search(f[0][0])]
        parts += [f"another thread at {named(each[0])}" for each in busy[:2]]
    return ", from ".join(parts[:2]) + "".join(f"; {part}" for part in parts[2:])


class Peer:
    """A connection to another watchdog: lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self._unread = connection, b""
        self.rank: int | None = None  # once it has shown the token
        self.is_open, self.has_ended = True, False  # the latter: its rank
        connection.settimeout(1.0)

    def send(self, message: Message) -> None:
        """Send a message; the connection is closed if that is not possible within a second."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.is_open = False

    def receive(self) -> list[Message]:
        """The messages that have come."""
        try:
            data = self.socket.recv(1 << 20)
        except OSError:
            data = b""
        *lines, self._unread = (self._unread + data).split(b"\n")
        if not data or len(self._unread) > 1 << 20:
            self.is_open = False
        try:
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError, RecursionError):  # a stranger
            self.is_open = False
            return []


class Watchdog:
    """The process: it watches its rank, and judges or reports to the judge."""

    def __init__(self, order: Message) -> None:
        self.order, self.rank, self.size = order, order["rank"], order["size"]
        self.watch = Watch(order)
        minutes = order["minutes"]
        self.tick = 1.0 if minutes is None else min(1.0, max(0.05, 60 * minutes / 20))
        self.peers: list[Peer] = []
        self.judge: Peer | None = None
        self.unheard = 0.0  # seconds since a word from the judge
        self.views = {rank: View(rank, "?") for rank in range(self.size)}
        self.server: socket.socket | None = None
        self.held = 0  # looks in a row at which the same ranks are to blame
        self.was_suspended = False

    def connect(self) -> None:
        """Listen to the other watchdogs, or connect to that of rank 0."""
        if self.order["listen"] is not None:
            self.server = socket.create_server((self.order["listen"], 0), backlog=self.size)
            self.server.setblocking(False)
            os.write(1, json.dumps({"port": self.server.getsockname()[1]}).encode() + b"\n")
            for rank, host in enumerate(json.loads(sys.stdin.buffer.readline())["hosts"]):
                self.views[rank].host = host
        elif self.order["judge"] is not None:
            try:
                self.judge = Peer(socket.create_connection(tuple(self.order["judge"]), 10.0))
            except OSError as error:
                host, port = self.order["judge"]
                say(
                    f"warning: rank {self.rank}: its watchdog cannot connect to that of rank 0 at "
                    f"{host}:{port} ({error}), so it watches this rank alone\n"
                )

    def run(self) -> None:
        """Watch until the rank has ended."""
        last = time.monotonic()
        due = last + self.tick
        while True:
            sources: list[Any] = [sys.stdin, *([self.server] if self.server else [])]
            poll = select.poll()  # there may be more than `select` can take
            for source in [*sources, *(each.socket for each in self._connections())]:
                poll.register(source, select.POLLIN)
            ready = {number for number, _ in poll.poll(1000 * max(0.0, due - time.monotonic()))}
            if sys.stdin.fileno() in ready or os.getppid() != self.watch.pid:
                for each in self._connections():
                    each.send({"ended": self.rank})  # else it is this process that was killed
                return
            if self.server is not None and self.server.fileno() in ready:
                with contextlib.suppress(OSError):  # it has hung up
                    self.peers.append(Peer(self.server.accept()[0]))
            for each in self._connections():
                if each.socket.fileno() in ready:
                    for message in each.receive():
                        self._take(each, message)
            if (now := time.monotonic()) >= due:
                # Not the time that has passed, but the time that this process has seen: if a
                # scheduler had frozen both, the rank has hardly run, either.
                self._look(min(now - last, 3 * self.tick))
                last, due = now, now + self.tick

    def _connections(self) -> list[Peer]:
        every = [*self.peers, *([self.judge] if self.judge else [])]
        return [each for each in every if each.is_open]

    def _take(self, peer: Peer, message: Message) -> None:
        peer.has_ended |= "ended" in message
        if peer is self.judge:
            self.unheard = 0.0
            if "end" in message:
                self._end(self.rank in message["end"])
        elif peer.rank is None:
            # What is not of this run may connect as well; it learns nothing.
            token = str(message.get("token")).encode(errors="replace")
            if not hmac.compare_digest(token, self.order["token"].encode()):
                peer.is_open = False
                peer.socket.close()
                return
            peer.rank = message["view"]["rank"]
        if peer.rank is not None and "view" in message:
            self.views[peer.rank] = View(**message["view"])

    def _look(self, seconds: float) -> None:
        self.watch.look(seconds)
        view = self.views[self.rank] = self.watch.view
        self._warn_of_suspension()
        if self.judge is not None and self.judge.is_open:
            self.judge.send({"token": self.order["token"], "view": asdict(view)})
            self.unheard += seconds
            if self.unheard < _SILENT * self.tick:
                return
        views = self._known(seconds)
        for peer in self.peers:
            if peer.is_open:
                peer.send({})
        guilty = blamed(views)
        self.held = self.held + 1 if guilty else 0
        # The others may be about to say whether they wait for it.
        if self.held > (2 if all(view.state for view in views) else _SILENT):
            self._report(guilty, views)
            for peer in self.peers:
                peer.send({"end": [view.rank for view in guilty]})
            self._end(any(view.rank == self.rank for view in guilty))

    def _known(self, seconds: float) -> list[View]:
        """What is known of every rank; of those that do not report, that they do not."""
        if self.rank:  # the judge is gone
            first = View(0, (self.order["judge"] or ["?"])[0], unheard=self.unheard)
            first.state = _state_of(self.judge, self.unheard > _SILENT * self.tick)
            return [first, self.watch.view]
        for peer in self.peers:
            if peer.rank is not None and (view := self.views[peer.rank]).state != "ended":
                view.unheard += seconds
                if not peer.is_open or view.unheard > _SILENT * self.tick:
                    view.state = _state_of(peer, True)
        return list(self.views.values())

    def _warn_of_suspension(self) -> None:
        view = self.watch.view
        if self.size == 1 and view.state == "stopped" and not self.was_suspended:
            self.was_suspended = True
            say(
                f"warning: this run is suspended (process {view.pid} is stopped); "
                f"`kill -CONT {view.pid}` resumes it\n"
            )

    def _report(self, guilty: Sequence[View], views: Sequence[View]) -> None:
        folder = Path(self.order["folder"])
        waiting = [view.rank for view in views if view.state == "waiting" and view not in guilty]
        text = message_of(guilty, waiting, self.size, folder / REPORT)
        recorder = self.order["flight_recorder"]
        if recorder and any(view.state == "waiting" for view in views):
            text += f"\n  NCCL's flight recorder: {recorder}RANK, which torchfrtrace reads"
            _within(2.0, lambda: _dump_flight_recorder(self.order["flight_pipe"]))
        first = guilty[0]
        content = {
            "rank": first.rank,
            "host": first.host,
            "message": text,
            "time": time.time(),
            "guilty": [view.rank for view in guilty],
            "waiting": waiting,
            "ranks": [asdict(view) for view in views],
        }
        # A pipe that nobody reads, and a disk that hangs, may be the very cause.
        _within(2.0, lambda: say(f"error: {text}\n"))
        _within(5.0, lambda: _write(folder, content, text))

    def _end(self, is_guilty: bool) -> None:
        if not is_guilty:
            time.sleep(_OTHERS_END)
        self.watch.end()
        os._exit(0)


def _state_of(peer: Peer | None, is_silent: bool) -> str:
    """The state of a rank whose watchdog reports no more; unknown if only that one was killed."""
    if peer is None or not (peer.is_open or peer.has_ended):
        return ""
    return "ended" if peer.has_ended else "silent" if is_silent else ""


def message_of(guilty: Sequence[View], waiting: Sequence[int], size: int, report: Path) -> str:
    """The message about a hang: who, where, what for, on which rows, who waits, what to do."""
    lines = []
    for view in guilty[:4]:
        who = f"rank {view.rank} of {size}" if size > 1 else "the run"
        pid = f", process {view.pid}" if view.pid else ""
        at = f", step {view.step}" + (
            f", micro-batch {view.micro_batch + 1}" if view.micro_batch >= 0 else ""
        )
        seconds = max(view.idle, view.unheard)
        why = _WHY[view.state].format(place=view.place or "an unknown place")
        lines.append(
            f"{who} on {view.host}{pid} has made no progress for {seconds:.0f} s "
            f"(parallel.timeout) while {view.phase}{at}: {why}"
        )
        if view.rows:
            lines.append(f"  rows: {view.rows}")
    if len(guilty) > 4:
        lines.append(f"  and {len(guilty) - 4} more ranks")
    if waiting:
        ranks = ", ".join(map(str, waiting[:8])) + (" …" if len(waiting) > 8 else "")
        lines.append(f"  waiting for it: rank {ranks}")
    elif size > 1 and all(view.state == "waiting" for view in guilty):
        lines.append(
            "  all ranks wait, for each other or for the network: if they wait in different "
            "collectives, code that only some ranks run has called one"
        )
    lines.append(f"  stacks of all ranks: {report}")
    lines.append("  Run the same command to resume from the latest checkpoint")
    return "hang: " + "\n".join(lines)


_WHY = {
    "running": "it is at {place}",
    "waiting": "it waits for other ranks, or for its device, at {place}",
    "stopped": "it is stopped (SIGSTOP or job control)",
    "blocked": "it waits for a disk or a device, at {place}",
    "ended": "its process has ended; its own message says why",
    "silent": "its machine is off, or cannot be reached",
}


def say(text: str) -> None:
    """Write to standard error."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


def _within(seconds: float, work: Callable[[], None]) -> None:
    """Run ``work``, but do not wait longer for it."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)


def _write(folder: Path, content: Message, text: str) -> None:
    """Write the report, and the end of the launch beside the lines of the run."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f".{REPORT}"
        aside.write_text(json.dumps(content, indent=2) + "\n")
        aside.replace(folder / REPORT)
        launches = folder / "launches.jsonl"
        if launches.exists():
            end = {"event": "end", "time": time.time(), "outcome": "failed", "kind": "Hang"}
            flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK  # a pipe of its name must not hang
            with os.fdopen(os.open(launches, flags), "a") as file:
                file.write(json.dumps({**end, "error": text[:2000]}) + "\n")


def _dump_flight_recorder(pipe: str) -> None:
    """Ask NCCL's own thread for its trace."""
    for path in Path(pipe).parent.glob(f"{Path(pipe).name}*.pipe"):
        with contextlib.suppress(OSError):
            path.write_text("1")


def main() -> None:
    """Watch the parent of this process, as the line on standard input says."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # they are for the rank; this ends with it
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one for each rank
    order = sys.stdin.buffer.readline()
    with _unless_the_rank_has_ended():
        dog = Watchdog(json.loads(order))
        dog.connect()
    dog.run()


@contextlib.contextmanager
def _unless_the_rank_has_ended() -> Iterator[None]:
    """A block that ends the process where it fails because its parent, a rank, is gone: the rank
    may get a signal while this begins."""
    try:
        yield
    except (OSError, ValueError):
        # The other end of standard input goes with the rank. It may go a moment after the rest.
        if select.select([sys.stdin], [], [], 1.0)[0] and not sys.stdin.buffer.readline():
            sys.exit()
        raise


if __name__ == "__main__":
    main()
