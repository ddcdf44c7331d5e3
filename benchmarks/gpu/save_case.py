"""Saves of a training run: stall, slowdown, time to the commit, load, and resume to first step.

    python benchmarks/gpu/save_case.py TASK.json

``train`` trains as ``surefoot train`` does, saves once on the way, and then starts a second process
that resumes from the checkpoint. ``torch`` does the same with torch.save, which blocks. ``limits``
measures what no save can be faster than: the copy from the device, and a write that is flushed.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

LAUNCHED = time.monotonic()  # before anything large is imported

import torch

import surefoot
from surefoot.checkpoint.loading import load
from surefoot.training.callback import Context, TrainerCallback, TrainerControl, TrainerState
from surefoot.training.step import Learner


@dataclass(frozen=True)
class Task:
    """The settings of one run."""

    task: str  # train, resume, torch or limits
    report: str
    output: str
    device: str
    inputs: str = ""
    model: str = ""
    batch: int = 1  # examples a step
    cutoff_len: int = 2048
    gb: float = 1.0  # of limits
    before: int = 6  # timed steps before the save
    after: int = 4  # at least so many steps after it
    fresh: bool = True  # resume in a new process


class DoneError(Exception):
    """Everything is measured: raised to leave the run without its last save."""


@dataclass
class Steps(TrainerCallback):
    """Times steps; saves after ``before`` of them, and leaves when the save is committed."""

    todo: Task
    seconds: list[float] = field(default_factory=list)
    began: float = 0.0
    saved_at: float | None = None  # when the save was requested
    figures: dict[str, float] = field(default_factory=dict)
    committed: Path | None = None

    def on_step_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The save of the step before, if any, has stalled the loop until here."""
        wait(self.todo.device)
        now = time.monotonic()
        if self.saved_at is not None and "stall_s" not in self.figures:
            self.figures["stall_s"] = now - self.saved_at
        self.began = now

    def on_step_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Note the seconds; request the save."""
        wait(self.todo.device)
        self.seconds.append(time.monotonic() - self.began)
        if len(self.seconds) == self.num_before:
            control.should_save, self.saved_at = True, time.monotonic()
        if self.committed and len(self.seconds) >= self.num_before + self.todo.after:
            self.figures["load_s"] = load_seconds(self.committed, args.learner, self.todo.device)
            raise DoneError

    def on_save(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The checkpoint is committed."""
        assert self.saved_at is not None
        self.figures["committed_after_s"] = time.monotonic() - self.saved_at
        self.figures["steps_beside"] = float(len(self.seconds) - self.num_before)
        self.committed = args.output_dir / f"checkpoint-{state.global_step}"

    @property
    def num_before(self) -> int:
        """Steps before the save; the first two, which warm up, are not timed."""
        return self.todo.before + 2

    def report(self) -> dict[str, float]:
        """All figures."""
        assert self.committed is not None
        before = median(self.seconds[2 : self.num_before])
        count = max(1, int(self.figures["steps_beside"]))
        beside = median(self.seconds[self.num_before : self.num_before + count])
        return {
            **self.figures,
            "step_s": before,
            "slower_percent": 100 * (beside / before - 1),
            "state_gb": size(self.committed) / 1e9,
        }


@dataclass
class FirstStep(TrainerCallback):
    """Leaves after the first step, and times the way to it."""

    todo: Task
    figures: dict[str, float] = field(default_factory=dict)

    def on_init_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The states are restored."""
        wait(self.todo.device)
        self.figures["restored_after_s"] = time.monotonic() - LAUNCHED

    def on_step_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The first step after the resume is done."""
        wait(self.todo.device)
        self.figures["first_step_after_s"] = time.monotonic() - LAUNCHED
        raise DoneError


def recipe(todo: Task) -> dict[str, object]:
    """A run in full, which saves only when it is requested."""
    return {
        "model": {"path": todo.model},
        "data": {
            "dataset_dir": todo.inputs,
            "datasets": ["rows"],
            "template": "chatml",
            "cutoff_len": todo.cutoff_len,
        },
        "method": "full",
        "stage": "sft",
        "optim": {"adamw": {"learning_rate": 1e-5, "schedule": "constant"}},
        "train": {
            "output_dir": todo.output,
            "max_steps": 100_000,
            "global_batch_size": todo.batch,
            "micro_batch_size": todo.batch,
        },
        "checkpoint": {"save_steps": None, "keep": 1},
    }


def run(todo: Task, callback: TrainerCallback) -> None:
    """Train until the callback has measured everything."""
    try:
        surefoot.train(recipe(todo), callbacks=[callback])
    except DoneError:
        return
    raise SystemExit("the run ended before everything was measured")


def train(todo: Task) -> dict[str, float]:
    """Save, load, and resume."""
    steps = Steps(todo)
    run(todo, steps)
    gc.collect()
    torch.cuda.empty_cache()  # the process that resumes needs the memory
    return steps.report() | (in_a_new_process(todo) if todo.fresh else resume(todo))


def load_seconds(folder: Path, learner: Learner, device: str) -> float:
    """Seconds to read weights and moments of a checkpoint into place, every hash checked."""
    states = learner.network.states(learner.optimizer_state, "model")
    began = time.monotonic()
    load(folder, states)
    wait(device)
    return time.monotonic() - began


def in_a_new_process(todo: Task) -> dict[str, float]:
    """Resume from the checkpoint, from the start of Python to the end of the first step."""
    report, task = Path(todo.report).with_suffix(".resume"), Path(todo.report).with_suffix(".task")
    task.write_text(json.dumps({**vars(todo), "task": "resume", "report": str(report)}))
    subprocess.run([sys.executable, __file__, str(task)], check=True)
    return json.loads(report.read_text())


def resume(todo: Task) -> dict[str, float]:
    """The way to the first step."""
    first = FirstStep(todo)
    run(todo, first)
    return first.figures


class TorchSave(Steps):
    """Saves the same tensors with torch.save and flushes them."""

    def on_step_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Note the seconds, and save."""
        wait(self.todo.device)
        self.seconds.append(time.monotonic() - self.began)
        if len(self.seconds) < self.num_before:
            return
        began, target = time.monotonic(), args.output_dir / "state.pt"
        with target.open("wb") as file:
            torch.save([args.model.state_dict(), args.optimizer.state_dict()], file)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.monotonic() - began
        self.figures = {"stall_s": seconds, "committed_after_s": seconds}
        self.figures["state_gb"] = target.stat().st_size / 1e9
        self.figures["step_s"] = median(self.seconds[2:])
        raise DoneError


def torch_save(todo: Task) -> dict[str, float]:
    """The stall of a save that blocks."""
    steps = TorchSave(todo)
    run(todo, steps)
    return steps.figures


def limits(todo: Task) -> dict[str, float]:
    """GB a second: from the device to pinned and to pageable memory, and to the disk."""
    count = int(todo.gb * 1e9)
    source = torch.ones(count, dtype=torch.uint8, device=todo.device)
    pageable = torch.zeros(count, dtype=torch.uint8)
    found = {"to_pageable_gb_s": rate(lambda: pageable.copy_(source), todo)}
    if todo.device == "cuda":
        pinned = torch.zeros(count, dtype=torch.uint8, pin_memory=True)
        found["to_pinned_gb_s"] = rate(lambda: pinned.copy_(source, non_blocking=True), todo)
    target = Path(todo.output) / "file"
    target.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with target.open("wb") as file:
        file.write(pageable.numpy())
        file.flush()
        os.fsync(file.fileno())
    return {**found, "to_disk_gb_s": todo.gb / (time.monotonic() - began), "state_gb": todo.gb}


def rate(work: Callable[[], object], todo: Task) -> float:
    """GB a second, the best of three."""
    seconds = []
    for _ in range(3):
        wait(todo.device)
        began = time.monotonic()
        work()
        wait(todo.device)
        seconds.append(time.monotonic() - began)
    return todo.gb / min(seconds)


def wait(device: str) -> None:
    """Wait until the device has done everything."""
    if device == "cuda":
        torch.cuda.synchronize()


def size(folder: Path) -> int:
    """Bytes of the files of a checkpoint."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


TASKS = {"train": train, "resume": resume, "torch": torch_save, "limits": limits}


def main() -> None:
    """Measure, and leave the report."""
    todo = Task(**json.loads(Path(sys.argv[1]).read_text()))
    Path(todo.report).write_text(json.dumps(TASKS[todo.task](todo)))
    if todo.task != "resume":
        shutil.rmtree(todo.output, ignore_errors=True)


if __name__ == "__main__":
    main()
