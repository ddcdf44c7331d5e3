"""Save the state once by one of the subjects; print what it took. Run by checkpoint.py."""

from __future__ import annotations

import json
import mmap
import os
import sys
from pathlib import Path

import costs
import state
import torch

CHUNK = 8 << 20


def plain(folder: Path, size: int, flags: int) -> None:
    """The same number of bytes as one new file, its space reserved first, and flushed."""
    memory = mmap.mmap(-1, size)
    view = memoryview(memory)
    for at in range(0, size, mmap.PAGESIZE):
        view[at : at + 8] = at.to_bytes(8, "little")

    def write() -> None:
        descriptor = os.open(folder / "file", os.O_RDWR | os.O_CREAT | flags)
        os.posix_fallocate(descriptor, 0, size)
        for at in range(0, size, CHUNK):
            os.pwrite(descriptor, view[at : at + CHUNK], at)
        os.fsync(descriptor)

    print(json.dumps(state.timed(write)))


def surefoot(folder: Path, made: torch.nn.Module, adam: torch.optim.AdamW, waiting: bool) -> None:
    """The second of two saves: memory is touched, the process runs."""
    from surefoot.checkpoint import AsyncSaver

    with AsyncSaver(folder, in_background=not waiting, share=False) as saver:
        for step in (1, 2):
            figures = state.timed(
                lambda step=step: (saver.save(step, state.states(made, adam)), saver.wait())
            )
        print(json.dumps(figures))


def dcp(folder: Path, tensors: dict[str, torch.Tensor], *, huggingface: bool) -> None:
    """In one process, without a process group."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    def write() -> None:
        if huggingface:
            places = dict.fromkeys(tensors, 1)
            writer = HuggingFaceStorageWriter(
                str(folder),
                fqn_to_index_mapping=places,
                enable_consolidation=True,
                save_distributed=True,
            )
            dcp.save(tensors, storage_writer=writer, no_dist=True)
        else:
            dcp.save(tensors, checkpoint_id=folder, no_dist=True)
        costs.sync(folder)

    print(json.dumps(state.timed(write)))


def trainer(folder: Path, made: torch.nn.Module, adam: torch.optim.AdamW) -> None:
    """What the Trainer does at a save step, in its own way and without a flush."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(output_dir=str(folder), report_to=[], use_cpu=True)
    made_trainer = Trainer(model=made, args=arguments)
    made_trainer.optimizer = adam
    made_trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(adam, lambda _: 1.0)
    made_trainer.state.global_step = 1
    work = lambda: made_trainer._save_checkpoint(made, trial=None)  # noqa: E731
    print(json.dumps(state.timed(work)))


def main(name: str, folder: Path, layers: int) -> None:
    """One subject."""
    made = state.model(layers)
    adam = state.optimizer(made)
    tensors = state.tensors(made, adam)
    size = sum(t.nbytes for t in tensors.values()) // mmap.PAGESIZE * mmap.PAGESIZE
    if name in ("write", "direct"):
        plain(folder, size, os.O_DIRECT if name == "direct" else 0)
    elif name.startswith("surefoot"):
        surefoot(folder, made, adam, waiting=name.endswith("waiting"))
    elif name == "torch":
        work = lambda: (torch.save(tensors, folder / "state.pt"), costs.sync(folder))  # noqa: E731
        print(json.dumps(state.timed(work)))
    elif name == "safetensors":
        from safetensors.torch import save_file

        work = lambda: (save_file(tensors, folder / "s.safetensors"), costs.sync(folder))  # noqa: E731
        print(json.dumps(state.timed(work)))
    elif name.startswith("dcp"):
        dcp(folder, tensors, huggingface=name.endswith("huggingface"))
    else:
        trainer(folder, made, adam)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
