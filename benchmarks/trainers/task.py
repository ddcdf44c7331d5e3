"""What a trainer is given and what it reports: the same for every subject, in either environment.

A trainer is a program of its own, so that each is timed in a fresh process. The clock runs from the
end of the warm-up steps to the end of the last step, loading and compiling left out. Tokens are
those that went into the model, padding not counted: every subject counts them by the same hook.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Task:
    """The settings of one run, read from the JSON file that the program is given."""

    inputs: str  # folder with the model, rows.json, and tokenized/, which holds input_ids, labels
    output: str  # folder of the run
    report: str
    variant: str  # of the subject
    method: str  # full or lora
    batch: int  # examples a step
    steps: int
    warmup: int  # steps that are not timed
    cutoff_len: int
    pad_token_id: int
    device: str = "cpu"  # or cuda, and then in bf16 over weights in float32
    model: str = ""  # folder of the model, if it is not that of the inputs
    stage: str = "sft"  # or dpo
    micro: int = 0  # examples per micro-batch; 0: all of a step
    rank: int = 8  # of LoRA
    dtype: str = "float32"  # of the weights that a peer loads; frozen ones may be bfloat16
    bits: int = 0  # of a quantized base: 4 or 8; 0: not quantized
    recompute: bool = False  # activation checkpointing
    deterministic: bool = True  # kernels, of Surefoot

    @property
    def model_path(self) -> str:
        """The folder of the model."""
        return self.model or self.inputs

    @property
    def micro_batch_size(self) -> int:
        """Examples per micro-batch."""
        return self.micro or self.batch


def task() -> Task:
    """The one this program was given."""
    return Task(**json.loads(Path(sys.argv[1]).read_text()))


@dataclass
class Meter:
    """Tells the steps' cost."""

    todo: Task
    tokens: int | torch.Tensor = 0  # since the warm-up; on the device, or each step would wait
    losses: list[float] = field(default_factory=list)
    num_steps: int = 0

    def watch(self, model: nn.Module) -> None:
        """Count the real tokens that go into ``model``."""

        def count(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
            if "input_ids" in kwargs:  # a fused head may call the layers alone
                self.tokens += (kwargs["input_ids"] != self.todo.pad_token_id).sum()

        model.register_forward_pre_hook(count, with_kwargs=True)

    def begin(self) -> None:
        """A step begins."""
        if self.num_steps == self.todo.warmup:
            self._forget_peak()
            self.tokens, self.cpu, self.wall = 0, time.process_time(), time.monotonic()

    def end(self) -> None:
        """A step has ended."""
        self.num_steps += 1
        if self.num_steps == self.todo.steps:
            self._wait()
            cpu, wall = time.process_time() - self.cpu, time.monotonic() - self.wall
            self.report = {
                "cpu": cpu,
                "wall": wall,
                "tokens": int(self.tokens),
                "examples": self.todo.batch * (self.todo.steps - self.todo.warmup),
                "peak_mb": self._peak_mb(),
            }

    def write(self) -> None:
        """Leave the report where it is looked for."""
        Path(self.todo.report).write_text(json.dumps(self.report | {"losses": self.losses}))

    def _wait(self) -> None:
        if self.todo.device == "cuda":
            torch.cuda.synchronize()

    def _forget_peak(self) -> None:
        """The peak is that from here on."""
        self._wait()
        if self.todo.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def _peak_mb(self) -> float:
        """Of what the GPU's allocator held, or of this process."""
        if self.todo.device == "cuda":
            return torch.cuda.max_memory_reserved() / 2**20
        return _resident_mb()


def _resident_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
