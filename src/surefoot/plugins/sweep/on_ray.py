"""Trials of a sweep on a Ray cluster: the study stays with the sweep, and a trial is a process on
the node that Ray has chosen.

An actor holds the process, as Ray kills whatever it ends: a trial that is to stop gets its signal
from the actor, and saves. A trial whose actor is lost, as when its node is, is started again, and
resumes from its latest checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from ...errors import RunError, counted
from ...parallel.ray_cluster import join
from ...storage.child import LAUNCHER
from ...storage.folder_lock import NAME as RUN_LOCK
from ...storage.folder_lock import is_held
from ...training.callbacks.launches import last_heartbeat, start_training

_LOOK = 1.0  # seconds between two looks at a trial
_SIGHT = 20.0  # seconds for a network disk to show a file to another machine
_QUICK = 30.0  # seconds in which a free node has started an actor
_PATIENCE = 600.0  # seconds for a node to join: an autoscaler starts a machine in minutes
_MAX_LOSSES = 3  # in a row, without a step further


@dataclass(frozen=True)
class Resources:
    """What Ray sets aside for each trial, on one node."""

    cpus: int
    gpus: float

    def __str__(self) -> str:
        cpus = counted(self.cpus, "CPU")
        if not self.gpus:
            return cpus
        shared = f"a GPU for {round(1 / self.gpus)} trials"
        return f"{cpus} and {counted(int(self.gpus), 'GPU') if self.gpus >= 1 else shared}"

    def fit(self, node: Mapping[str, float]) -> bool:
        """Whether a node has them, free or not."""
        return node.get("CPU", 0) >= self.cpus and node.get("GPU", 0) >= self.gpus


def connect(jobs: int, gpus: int | None, cpus: int | None) -> Resources:
    """Join the cluster; what each of ``jobs`` trials at once gets of it. Raises ``RunError``: there
    is none."""
    advice = "start one with `ray start --head`, or name one with RAY_ADDRESS=HOST:PORT"
    join("auto", advice, log_to_driver=False)
    return divided(_nodes(), jobs, gpus, cpus)


def divided(
    nodes: Sequence[Mapping[str, float]], jobs: int, gpus: float | None, cpus: int | None
) -> Resources:
    """The resources of each of ``jobs`` trials at once, where not given: as many GPUs as all of
    them get on these nodes, and a CPU for each; on nodes without GPUs as many CPUs. Trials share a
    GPU if there are fewer than trials."""
    num_gpus = [int(node.get("GPU", 0)) for node in nodes]
    if gpus is None:
        gpus = _share(num_gpus, jobs)
        if not gpus and any(num_gpus):
            gpus = 1 / -(-jobs // sum(num_gpus))
    if cpus is None:
        num_cpus = [int(node.get("CPU", 0)) for node in nodes]
        cpus = max(1, int(gpus) if gpus else _share(num_cpus, jobs))
    return Resources(cpus, gpus)


def _share(counts: Sequence[int], jobs: int) -> int:
    """The largest share of which ``jobs`` fit into nodes that have ``counts``; 0 if there is
    none."""
    shares = range(max(counts, default=0), 0, -1)
    return next((n for n in shares if sum(count // n for count in counts) >= jobs), 0)


def _nodes() -> list[Mapping[str, float]]:
    """The resources of each node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


@dataclass
class TrialActor:
    """Starts a trial, and holds its process. Ray has set ``CUDA_VISIBLE_DEVICES`` and
    ``OMP_NUM_THREADS`` of this process, which the trial inherits."""

    folder: Path
    arguments: Sequence[str]
    cwd: Path
    is_on_gpu: bool
    _process: subprocess.Popen[bytes] | None = None
    _num_sent: int = 0

    def poll(self, signals: Sequence[int]) -> int | None:
        """The exit code; None while the trial runs. ``signals`` are all that it is to get: it
        gets those that it has not. The first call starts it. Raises ``RunError``."""
        if self._process is None:
            self._process = self._start()
        for number in signals[self._num_sent :]:
            self._process.send_signal(number)
        self._num_sent = len(signals)
        return self._process.poll()

    def _start(self) -> subprocess.Popen[bytes]:
        # Else the trial would train into a folder of this node, which the sweep never sees.
        deadline = time.monotonic() + _SIGHT
        while missing := [p for p in (self.cwd, Path(self.arguments[-1])) if not p.exists()]:
            if time.monotonic() > deadline:
                raise RunError(
                    f"--on ray: node {ray.util.get_node_ip_address()} does not see {missing[0]}; "
                    "all nodes need the folder of the sweep, the recipe's files and the current "
                    "folder at the same paths"
                )
            time.sleep(0.2)
        environment = {LAUNCHER: str(os.getpid())}
        if not self.is_on_gpu:  # Ray hides no GPU from an actor without one
            environment["CUDA_VISIBLE_DEVICES"] = ""
        return start_training(self.folder, self.arguments, cwd=self.cwd, environment=environment)


@dataclass
class RayTrial:
    """The process of a trial on some node, which is another one after a loss."""

    resources: Resources
    tell: Callable[[str], None]
    folder: Path
    arguments: Sequence[str]
    _actor: Any = None
    _code: int | None = None
    _signals: list[int] = field(default_factory=list)
    _next_look: float = 0.0

    def __post_init__(self) -> None:
        self._looks = self._train()

    def __str__(self) -> str:
        return f"trial {int(self.folder.name.rpartition('-')[2])}"

    def poll(self) -> int | None:
        """The exit code; None while the trial runs, or waits for a node. Raises ``RunError``."""
        now = time.monotonic()
        if self._code is None and now >= self._next_look:
            self._next_look = now + _LOOK
            try:
                next(self._looks)
            except StopIteration as end:
                self._end(end.value)
            except RunError:
                self._end(128 + signal.SIGTERM)  # what ends the sweep does not start it again
                raise
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal to the process; one that waits for a node never starts."""
        self._signals.append(number)

    def _end(self, code: int) -> None:
        self._code = code
        if self._actor is not None:
            ray.kill(self._actor)

    def _train(self) -> Generator[None, None, int]:
        """Train on a node, and on another one after a loss; the exit code. Each step is a look."""
        num_losses, last_step = 0, -1
        while True:
            # The process may live on, on a node that Ray alone has lost.
            while not self._signals and is_held(self.folder / RUN_LOCK):
                yield
            if self._signals:
                return 128 + self._signals[-1]
            try:
                return (yield from self._train_on_a_node())
            except RayError as error:
                self._actor, reason = None, str(error).strip().splitlines()[-1].strip()
            step = last_heartbeat(self.folder).get("step", -1)
            num_losses = 1 if step > last_step else num_losses + 1
            last_step = step
            if num_losses == _MAX_LOSSES and not self._signals:
                self.tell(f"{self}: lost {num_losses} times at one step ({reason})")
                return 128 + signal.SIGTERM
            if not self._signals:
                self.tell(f"{self}: lost ({reason}); it starts again once nobody has its folder")
                yield

    def _train_on_a_node(self) -> Generator[None, None, int]:
        """Wait for a node, and then for the exit code. Raises ``RayError`` if the actor is lost."""
        options = {"num_cpus": self.resources.cpus, "num_gpus": self.resources.gpus}
        self._actor = ray.remote(**options)(TrialActor).remote(
            self.folder, self.arguments, Path.cwd(), self.resources.gpus > 0
        )
        answer = self._actor.poll.remote(self._signals)
        placed, is_started, is_announced = time.monotonic(), False, False
        while True:
            yield
            if self._signals and not is_started:
                return 128 + self._signals[-1]
            if not ray.wait([answer], timeout=0)[0]:
                seconds = time.monotonic() - placed
                if not is_started and seconds > _QUICK:
                    line = self._waits_for(seconds)
                    if not is_announced:
                        self.tell(f"{self}: {line}")
                    is_announced = True
                continue
            try:
                code: int | None = ray.get(answer)
                is_started = True
            except RayTaskError as error:
                raise RunError(str(error.cause)) from error
            except ActorUnavailableError:  # for now
                code = None
            if code is not None:
                return code
            answer = self._actor.poll.remote(self._signals)

    def _waits_for(self, seconds: float) -> str:
        """What the trial has waited for, so long. Raises ``RunError`` if it waits in vain."""
        if any(map(self.resources.fit, _nodes())):
            return f"waiting for {self.resources} on one node, in use now"
        line = f"no node of the cluster has {self.resources}"
        if seconds > _PATIENCE:
            raise RunError(
                f"--on ray: {line}, and none has joined in {_PATIENCE / 60:g} minutes; "
                "choose other --gpus or --cpus, or start such a node"
            )
        return f"{line}; waiting for one to join, {_PATIENCE / 60:g} minutes at most"
