"""Some steps of a run under torch.profiler: the costliest kernels, idle gaps, host time.

    python benchmarks/gpu/profile_case.py TASK.json

The task is that of a speed case. Of the steps after the warm-up the first half are timed alone, for
the true time of a step; the others are profiled. On a GPU the kernels are those of the device;
without one, the operators of the CPU, so that all of this can be tried there.
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
from task import Meter, Task, task
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from with_surefoot import recipe

import surefoot
from surefoot.training.callback import Context, TrainerCallback, TrainerControl, TrainerState
from surefoot.use.bench import gemm_flops

NUM_KERNELS, NUM_GAPS = 10, 5
LONGEST_NAME = 100
SMALLEST_GAP_US = 5.0  # shorter ones lie between any two kernels
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
# Kinds of kernels by parts of their names, in lower case; the first that fits. cuBLAS's own are
# named nvjet on Hopper, and attention's may contain cutlass.
KINDS = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "optimizer": ("multi_tensor", "adam"),
    "products": ("gemm", "gemv", "nvjet", "cutlass", "xmma", "cublas", "splitk", "::mm", "addmm"),
    "gather, scatter, embedding": ("gather", "scatter", "index", "embedding", "sort"),
    "copies and casts": ("memcpy", "memset", "copy", "cast", "catarray", "fill"),
    "softmax, norms, sums": ("softmax", "norm", "reduce", "sum"),
}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
WAITS += ("aten::_local_scalar_dense", "aten::nonzero")  # read the device, or its sizes


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
        self.todo, self.num_steps, self.meter = todo, 0, Meter(todo)
        self.num_plain = (todo.steps - todo.warmup) // 2
        self.num_profiled = todo.steps - todo.warmup - self.num_plain
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if todo.device == "cuda" else []
        self.profiler = profile(activities=activities)
        self.host: dict[str, float] = defaultdict(float)
        self.peak_gb = 0.0  # of the device
        self.mark = 0.0

    def on_train_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The model is ready."""
        self.meter.watch(args.model)

    def on_step_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The first ones after the warm-up are timed; those after them are profiled."""
        if self.num_steps == self.todo.warmup:
            self._wait()
            self.meter.tokens, self.plain_began = 0, time.perf_counter()
            if self.todo.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
        if self.num_steps == self.todo.warmup + self.num_plain:
            self._wait()
            self.plain_seconds = time.perf_counter() - self.plain_began
            self.tokens = int(self.meter.tokens)
            if self.todo.device == "cuda":
                self.peak_gb = torch.cuda.max_memory_reserved() / 2**30
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


def kind_of(name: str) -> str:
    """What a kernel is for, by its name."""
    low = name.lower()
    fits = (kind for kind, signs in KINDS.items() if any(sign in low for sign in signs))
    return next(fits, "elementwise and others")


def by_kind(found: Iterable[Work], steps: int) -> dict[str, float]:
    """Milliseconds a step of each kind of kernel, the most first."""
    spent: dict[str, float] = defaultdict(float)
    for work in found:
        spent[kind_of(work.name)] += work.own / 1000 / steps
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def waits(profiler: profile, steps: int) -> list[dict[str, object]]:
    """What makes the host wait for the device: calls and milliseconds a step."""
    count: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == DeviceType.CPU and event.name in WAITS:
            count[event.name].append(event.time_range.elapsed_us() / 1000)
    return [
        {"name": name, "calls_a_step": len(ms) / steps, "ms_a_step": sum(ms) / steps}
        for name, ms in count.items()
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
    steps = watch.num_profiled
    device = torch.device(watch.todo.device)
    idle = sorted(gaps(found), reverse=True)
    lost = sum(gap for gap, _, _ in idle)
    return {
        "plain_step_ms": 1000 * watch.plain_seconds / watch.num_plain,
        "tokens_a_step": watch.tokens / watch.num_plain,
        "peak_gb": watch.peak_gb,
        "gemm_tflops": gemm_flops(DTYPES[watch.todo.device], device) / 1e12,
        "kinds_ms": by_kind(found, steps),
        "waits": waits(watch.profiler, steps),
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
