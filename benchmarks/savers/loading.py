"""Load the state into tensors that are there, once, with warm files. Run by checkpoint.py."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import state
import torch

CHUNK = 8 << 20


def plain(folder: Path, tensors: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Read as many bytes as all tensors have into one touched buffer."""
    size = sum(t.nbytes for t in tensors.values())
    (folder / "file").write_bytes(os.urandom(1 << 20) * (size // (1 << 20) + 1))
    into = memoryview(bytearray(size))

    def read() -> None:
        descriptor = os.open(folder / "file", os.O_RDONLY)
        for at in range(0, size, CHUNK):
            os.preadv(descriptor, [into[at : at + CHUNK]], at)

    return read


def copied(found: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    """What the peers return, put into place."""
    for name, tensor in tensors.items():
        tensor.copy_(found[name])


def prepared(
    name: str, folder: Path, made: torch.nn.Module, adam: torch.optim.AdamW
) -> Callable[[], object]:
    """Write the subject's file; what loads it."""
    tensors = state.tensors(made, adam)
    if name == "read":
        return plain(folder, tensors)
    if name == "surefoot":
        from surefoot.checkpoint import load, save

        path = save(folder, 1, state.states(made, adam), kind="full")
        return lambda: load(path, state.states(made, adam))
    if name.startswith("torch"):
        torch.save(tensors, folder / "state.pt")
        mapped = name.endswith("mmap")
        return lambda: copied(torch.load(folder / "state.pt", mmap=mapped), tensors)
    if name == "safetensors":
        from safetensors.torch import load_file, save_file

        save_file(tensors, folder / "s.safetensors")
        return lambda: copied(load_file(folder / "s.safetensors"), tensors)
    import torch.distributed.checkpoint as dcp

    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    return lambda: dcp.load(tensors, checkpoint_id=folder, no_dist=True)


def main(name: str, folder: Path, layers: int) -> None:
    """The second of two loads: the files are in the cache, the memory is touched."""
    made = state.model(layers)
    work = prepared(name, folder, made, state.optimizer(made))
    work()
    print(json.dumps(state.timed(work)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
