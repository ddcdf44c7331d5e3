"""Copy live tensors into the snapshot buffer: all that a save costs the training thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .snapshot_buffer import FileImages, SnapshotBuffer

Groups = Mapping[str, Mapping[str, torch.Tensor]]  # role -> name -> tensor


def take(images: FileImages, groups: Groups) -> None:
    """Fill the image of every file: its header, and the current values of the tensors."""
    with _overlapping(groups):
        for shard in images.shards:
            image = images.of(shard)
            image[: len(shard.plan.head)] = shard.plan.head
            for name in images.names(shard):
                _copy(groups[shard.role][name], images.tensor(shard, name))


@torch.no_grad()
def _copy(tensor: torch.Tensor, into: memoryview) -> None:
    if tensor.numel():
        place = torch.frombuffer(into, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor.detach(), non_blocking=True)


@contextlib.contextmanager
def _overlapping(groups: Groups) -> Iterator[None]:
    """Copies from a GPU overlap with its other work, and are complete at the end of the block."""
    devices = {t.device for tensors in groups.values() for t in tensors.values() if t.is_cuda}
    with contextlib.ExitStack() as stack:
        for device in devices:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            stack.callback(stream.synchronize)
            stack.enter_context(torch.cuda.stream(stream))
        yield


def pin(arena: SnapshotBuffer) -> bool:
    """Pin the buffer's pages for direct copies from GPUs; if that fails, copies are slower."""
    status = _runtime().cudaHostRegister(_address(arena), arena.size, 0)
    return int(status) == 0


def unpin(arena: SnapshotBuffer) -> None:
    """Unpin the pages, before the buffer is freed."""
    _runtime().cudaHostUnregister(_address(arena))


def _address(arena: SnapshotBuffer) -> int:
    return torch.frombuffer(arena.view, dtype=torch.uint8).data_ptr()


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
