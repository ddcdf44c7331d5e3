"""One of several processes that save one state by one of the subjects. Run by ranks.py."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import state
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

Tensors = dict[str, torch.Tensor]
SAVES = 2  # the first takes the memory
COLUMNS = ("o_proj", "down_proj")  # what tensor parallelism cuts by columns


class Held:
    """A state that is there."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        """The tensors."""
        return self.held

    def load_state_dict(self, found: dict[str, Any]) -> None:
        """Not asked for."""


def placed(name: str, shape: torch.Size, cut: str) -> Shard | Replicate:
    """How a tensor is cut over the processes."""
    if cut == "copies" or (cut == "columns" and len(shape) == 1):
        return Replicate()
    return Shard(1 if cut == "columns" and any(part in name for part in COLUMNS) else 0)


def spread(layers: int, cut: str, mesh: DeviceMesh) -> tuple[Tensors, dict[str, Tensors]]:
    """Weights and moments of which this process has its part."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in state.model(layers).named_parameters()}

    def made(name: str, shape: torch.Size) -> torch.Tensor:
        where = placed(name, shape, cut)
        local = list(shape)
        if isinstance(where, Shard):
            local[where.dim] //= mesh.size()
        torch.manual_seed(dist.get_rank() if isinstance(where, Shard) else 0)
        values = torch.randn(local)
        return DTensor.from_local(values, mesh, [where], run_check=False)

    model = {name: made(name, shape) for name, shape in shapes.items()}
    moments = {
        name: {slot: made(name, shape) for slot in ("exp_avg", "exp_avg_sq")}
        for name, shape in shapes.items()
    }
    return model, moments


def surefoot(
    layout: str, folder: Path, tensors: tuple[Tensors, Any], *, waits: bool = False
) -> tuple[Callable[[int], None], Callable[[], int]]:
    """What begins a save, and what waits for it: the bytes that this process has written."""
    from surefoot.checkpoint.saving._writer_process import Background
    from surefoot.checkpoint.saving.preparation import WriterGroup, prepare

    def exchange(value: object) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found

    crew = WriterGroup(layout, dist.get_rank(), dist.get_world_size(), {}, exchange)  # type: ignore[arg-type]
    flight, share = Background(is_off=waits), [0]
    states = {"model": Held(tensors[0]), "optimizer": Held(tensors[1])}

    def begin(step: int) -> None:
        job, live = prepare(folder, step, states, writers=crew)
        share[0] = sum(t.nbytes for group in live.groups.values() for t in group.values())
        flight.save(job, live)

    def wait() -> int:
        flight.wait()
        return share[0]

    return begin, wait


def pytorch(
    how: str, folder: Path, tensors: tuple[Tensors, Any]
) -> tuple[Callable[[int], None], Callable[[], int]]:
    """The same of DCP, which flushes every file as well."""
    flat = {"model": tensors[0], "optimizer": tensors[1]}
    running: list[Any] = []
    kinds = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}

    def begin(step: int) -> None:
        target = str(folder / str(step))
        if how == "":
            dcp.save(flat, checkpoint_id=target)
        else:
            kind = kinds[how]
            future = dcp.async_save(flat, checkpoint_id=target, async_checkpointer_type=kind)
            running.append(future)

    def wait() -> int:
        if running:
            running.pop().result()
        return 0

    return begin, wait


def main(name: str, cut: str, folder: Path, layers: int) -> dict[str, float]:
    """Save twice; what the second one took."""
    meeting, rank, count = os.environ["MEETING"].rsplit(maxsplit=2)
    where = f"file://{meeting}"
    dist.init_process_group("gloo", init_method=where, rank=int(rank), world_size=int(count))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("x",))
    tensors = spread(layers, cut, mesh)
    kind, _, how = name.partition("_")
    if kind == "dcp":
        begin, wait = pytorch(how, folder, tensors)
    else:
        begin, wait = surefoot(kind, folder, tensors, waits=how == "waiting")
    for step in range(1, SAVES + 1):
        dist.barrier()
        began = time.perf_counter()
        begin(step)
        stall = time.perf_counter() - began
        share = wait()
        dist.barrier()
        seconds = time.perf_counter() - began
    (last,) = (path for path in folder.iterdir() if path.name.endswith(str(SAVES)))
    size = sum(path.stat().st_size for path in last.rglob("*") if path.is_file())
    return {"stall": stall, "seconds": seconds, "bytes": size, "share": share}


if __name__ == "__main__":
    result = main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    print(json.dumps(result), flush=True)
    os._exit(0)  # DCP's process beside does not always end
