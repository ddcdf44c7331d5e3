"""Train some steps and save on the way by one of the subjects. Run by checkpoint.py.

A step is one of the real model: forward, backward and Adam over every parameter.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import state
import torch

SAVES, BEFORE = 2, 3  # saves that count; steps before each of them
TOKENS = (2, 128)  # a batch: rows and their length


class Loop:
    """What saves on the way."""

    def __init__(self, folder: Path, made: torch.nn.Module, adam: torch.optim.AdamW) -> None:
        self.folder, self.made, self.adam = folder, made, adam

    def save(self, step: int) -> None:
        """Begin to save; training may go on when this returns."""

    def is_done(self) -> bool:
        """Whether the last save is on the disk (or, of peers that do not flush, handed over)."""
        return True

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

    def is_done(self) -> bool:
        """Committed."""
        self.saver.poll()
        return self.saver.in_flight is None

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

    def is_done(self) -> bool:
        """By its future."""
        return self.running is None or self.running.done()

    def close(self) -> None:
        """Wait for the last."""
        if self.running is not None:
            self.running.result()


SUBJECTS: dict[str, Callable[..., Loop]] = {
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
    """Some steps, a save, steps until it is done, and so on; the first save, which takes memory, is
    left out."""
    made = state.model(layers)
    adam = state.optimizer(made)
    one_copy = min(copy_seconds(state.tensors(made, adam)) for _ in range(3))
    subject = SUBJECTS[name](folder, made, adam)
    ids = torch.randint(0, state.VOCABULARY, TOKENS)

    def step() -> float:
        began = time.perf_counter()
        made(input_ids=ids, labels=ids).loss.backward()
        adam.step()
        adam.zero_grad()
        return time.perf_counter() - began

    found: dict[str, list[float]] = {"stall": [], "copies": [], "slower": [], "window": []}
    for number in range(SAVES + 1):
        before = median(step() for _ in range(BEFORE))
        began = time.perf_counter()
        subject.save(number)
        stall = time.perf_counter() - began
        beside = []
        while not subject.is_done():
            beside.append(step())
        if number:
            found["stall"].append(stall)
            found["copies"].append(stall / one_copy)
            found["window"].append(time.perf_counter() - began)
            found["slower"].append(100 * (median(beside) / before - 1) if beside else 0.0)
    subject.close()
    print(json.dumps({key: median(values) for key, values in found.items()}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
