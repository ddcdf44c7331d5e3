"""Some steps of a run under torch.profiler: the costliest kernels, idle gaps, host time.

    python benchmarks/gpu/profile_case.py TASK.json

The task is that of a speed case; the steps after the warm-up are profiled. On a GPU the kernels are
those of the device; without one, the operators of the CPU, so that all of this can be tried there.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "trainers"))

import torch
from task import Task, task
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from with_surefoot import recipe

import surefoot
from surefoot.training.callback import Context, TrainerCallback
from surefoot.training.state import TrainerControl, TrainerState

NUM_KERNELS, NUM_GAPS = 10, 5
LONGEST_NAME = 100
SMALLEST_GAP_US = 5.0  # shorter ones lie between any two kernels


@dataclass(frozen=True)
class Work:
    """One kernel, or an operator of the CPU, in microseconds."""

    name: str
    began: float
    ended: float
    own: float  # without what it calls


class DoneError(Exception):
    """All steps are profiled: raised to leave the run."""


class Watch(TrainerCallback):
    """Profiles the steps after the warm-up."""

    def __init__(self, todo: Task) -> None:
        self.todo, self.num_steps = todo, 0
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if todo.device == "cuda" else []
        self.profiler = profile(activities=activities)
        self.host: dict[str, float] = defaultdict(float)
        self.mark = 0.0

    def on_step_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The first one after the warm-up starts the profiler."""
        if self.num_steps == self.todo.warmup:
            self._wait()
            self.profiler.start()
            self.began = time.perf_counter()
            self.mark = self.began
        self._spent("between steps")

    def on_pre_optimizer_step(
        self, args: Context, state: TrainerState, control: TrainerControl
    ) -> None:
        """Forward and backward are launched."""
        self._spent("forward and backward")

    def on_optimizer_step(
        self, args: Context, state: TrainerState, control: TrainerControl
    ) -> None:
        """The update is launched."""
        self._spent("optimizer")

    def on_step_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The last one ends the run."""
        self._spent("end of step")
        self.num_steps += 1
        if self.num_steps == self.todo.steps:
            self._wait()
            self.seconds = time.perf_counter() - self.began
            self.profiler.stop()
            raise DoneError

    def _spent(self, phase: str) -> None:
        """The host's seconds since the last mark belong to a phase."""
        now = time.perf_counter()
        if self.mark:
            self.host[phase] += now - self.mark
            self.mark = now

    def _wait(self) -> None:
        if self.todo.device == "cuda":
            torch.cuda.synchronize()


def works(profiler: profile, device: str) -> list[Work]:
    """What the device did, in order."""
    is_cpu = device == "cpu"
    wanted = DeviceType.CPU if is_cpu else DeviceType.CUDA
    found = [
        Work(
            event.name,
            event.time_range.start,
            event.time_range.end,
            event.self_cpu_time_total
            if wanted == DeviceType.CPU
            else event.time_range.elapsed_us(),
        )
        for event in profiler.events()
        if event.device_type == wanted and not getattr(event, "is_user_annotation", False)
    ]
    return sorted(found, key=lambda work: work.began)


def costliest(found: Iterable[Work], steps: int) -> list[dict[str, object]]:
    """Names of kernels by their time, with their share of all and their number a step."""
    spent: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for work in found:
        spent[work.name] += work.own
        count[work.name] += 1
    total = sum(spent.values()) or 1.0
    names = sorted(spent, key=lambda name: -spent[name])[:NUM_KERNELS]
    return [
        {
            "name": shortened(name),
            "ms_a_step": spent[name] / 1000 / steps,
            "percent": 100 * spent[name] / total,
            "calls_a_step": count[name] / steps,
        }
        for name in names
    ]


def shortened(name: str) -> str:
    """A kernel's name without what templates add, at most so long."""
    return re.sub(r"\s+", " ", name.replace("|", "/"))[:LONGEST_NAME]


def gaps(found: Sequence[Work]) -> list[tuple[float, str, str]]:
    """Idle microseconds between works that are sorted by start, and the names around each."""
    idle: list[tuple[float, str, str]] = []
    last: Work | None = None
    for work in found:
        if last is not None and work.began - last.ended >= SMALLEST_GAP_US:
            idle.append((work.began - last.ended, shortened(last.name), shortened(work.name)))
        if last is None or work.ended > last.ended:
            last = work
    return idle


def figures(found: Sequence[Work], watch: Watch) -> dict[str, object]:
    """All of it, a step."""
    steps = watch.todo.steps - watch.todo.warmup
    idle = sorted(gaps(found), reverse=True)
    lost = sum(gap for gap, _, _ in idle)
    return {
        "step_ms": 1000 * watch.seconds / steps,
        "host_ms": {phase: 1000 * s / steps for phase, s in watch.host.items()},
        "idle_ms": lost / 1000 / steps,
        "idle_percent": 100 * lost / 1e6 / watch.seconds,
        "gaps_a_step": len(idle) / steps,
        "longest_gaps": [
            {"ms": gap / 1000, "after": before, "before": after}
            for gap, before, after in idle[:NUM_GAPS]
        ],
        "kernels": costliest(found, steps),
        "kernels_a_step": len(found) / steps,
    }


def main() -> None:
    """Train, profile, and leave the report."""
    todo = task()
    watch = Watch(todo)
    try:
        surefoot.train(recipe(todo), callbacks=[watch])
    except DoneError:
        found = works(watch.profiler, todo.device)
        Path(todo.report).write_text(json.dumps(figures(found, watch)))


if __name__ == "__main__":
    main()
