"""Train some steps and save on the way by one of the subjects. Run by checkpoint.py.

A step is one of the real model: forward, backward and Adam over every parameter.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import state
import torch

STEPS, EVERY, WARM = 24, 6, 2
TOKENS = (2, 128)  # a batch: rows and their length


class Loop:
    """No saves: the floor."""

    def __init__(self, folder: Path, made: torch.nn.Module, adam: torch.optim.AdamW) -> None:
        self.folder, self.made, self.adam = folder, made, adam

    def save(self, step: int) -> None:
        """Begin to save; training may go on when this returns."""

    def close(self) -> None:
        """Return when every save is done."""


class Surefoot(Loop):
    """In the background, or waiting."""

    def __init__(self, *parts: object, in_background: bool = True) -> None:
        from surefoot.checkpoint import AsyncSaver

        super().__init__(*parts)  # type: ignore[arg-type]
        self.saver = AsyncSaver(self.folder, in_background=in_background, keep=1, share=False)

    def save(self, step: int) -> None:
        """A snapshot, or all of it."""
        self.saver.save(step, state.states(self.made, self.adam))

    def close(self) -> None:
        """Wait for the last."""
        self.saver.close()


class Torch(Loop):
    """Synchronous, as most loops do it, and not flushed."""

    def save(self, step: int) -> None:
        """All of it."""
        torch.save(state.tensors(self.made, self.adam), self.folder / f"{step}.pt")


class Dcp(Loop):
    """``async_save`` in a thread or a process."""

    def __init__(self, *parts: object, process: bool) -> None:
        import torch.distributed as dist
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        super().__init__(*parts)  # type: ignore[arg-type]
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        self.kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        self.running = None

    def save(self, step: int) -> None:
        """Begin, once the last one is done."""
        import torch.distributed.checkpoint as dcp

        self.close()
        self.running = dcp.async_save(
            state.tensors(self.made, self.adam),
            checkpoint_id=self.folder / str(step),
            async_checkpointer_type=self.kind,
        )

    def close(self) -> None:
        """Wait for the last."""
        if self.running is not None:
            self.running.result()


SUBJECTS: dict[str, Callable[..., Loop]] = {
    "none": Loop,
    "surefoot": Surefoot,
    "surefoot_waiting": lambda *parts: Surefoot(*parts, in_background=False),
    "torch": Torch,
    "dcp_thread": lambda *parts: Dcp(*parts, process=False),
    "dcp_process": lambda *parts: Dcp(*parts, process=True),
}


def copy_seconds(tensors: dict[str, torch.Tensor]) -> float:
    """One copy of the state in memory into pages that are touched."""
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    began = time.perf_counter()
    for name, tensor in tensors.items():
        into[name].copy_(tensor)
    return time.perf_counter() - began


def main(name: str, folder: Path, layers: int) -> None:
    """Steps are timed without the calls that save; the first save, which takes memory, is left
    out."""
    made = state.model(layers)
    adam = state.optimizer(made)
    one_copy = copy_seconds(state.tensors(made, adam))
    subject = SUBJECTS[name](folder, made, adam)
    ids = torch.randint(0, state.VOCABULARY, TOKENS)
    stalls, steps = [], []

    def step() -> float:
        began = time.perf_counter()
        made(input_ids=ids, labels=ids).loss.backward()
        adam.step()
        adam.zero_grad()
        return time.perf_counter() - began

    for _ in range(WARM):
        step()
    subject.save(0)
    for _ in range(WARM):
        step()
    whole = time.perf_counter()
    for number in range(1, STEPS + 1):
        steps.append(step())
        if number % EVERY == 0:
            began = time.perf_counter()
            subject.save(number)
            stalls.append(time.perf_counter() - began)
    trained = time.perf_counter() - whole
    subject.close()
    figures = {
        "step_seconds": sum(steps) / len(steps),
        "stall_seconds": sum(stalls) / len(stalls),
        "stall_copies": sum(stalls) / len(stalls) / one_copy,
        "loop_seconds": trained,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
