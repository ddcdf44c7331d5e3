"""The process group of a run, as one rank sees it: its place, the axes of the mesh, and how ranks
communicate."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ..errors import LostPeerError, RunError, SurefootError, counted
from ..log import announced
from ..storage.child import die_with_launcher
from ..storage.memory import allocator_message, is_out_of_memory
from .progress import Progress, wait_for_ranks
from .section import ParallelSection, launched, name_ranks
from .sharding import DATA_AXES

_PLACE = re.compile(r"^\[[^]]*\.cc:\d+\] ")
_WAIT = (
    "%s of %d at %s, for up to %g minutes (parallel.timeout). WORLD_SIZE, RANK and "
    "MASTER_ADDR, or SLURM's names of them, are in the environment: if no launcher has started "
    "this process, unset MASTER_ADDR"
)
_PATIENCE = timedelta(hours=12)  # for what one process does for all: downloading a checkpoint, say
T = TypeVar("T")


@dataclass(frozen=True)
class RowGroup:
    """The ranks that share each packed row, as one of them sees them (``context_parallel``)."""

    rank: int
    size: int
    # None: of a dry run, which receives values that do not exist
    group: dist.ProcessGroup | None = field(default=None, compare=False)


@dataclass(frozen=True)
class World:
    """One rank of ``size``. A single rank has no mesh, and everything here is a no-op."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    patient: dist.ProcessGroup | None = None  # all of them, to wait in for the main one
    local_rank: int = 0  # among the ranks of its machine
    timeout: timedelta = timedelta(minutes=10)  # of collectives
    is_apart: bool = False  # whether its machines have no folder in common
    progress: Progress = field(default_factory=Progress, compare=False, repr=False)
    row_group: RowGroup | None = None  # the ranks that share each row with this one

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which logs, and writes what exists once."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.local_rank == 0

    @property
    def first_local_rank(self) -> int:
        """The rank that is the first one of this machine, if ranks are numbered machine by
        machine."""
        return self.rank - self.local_rank

    @property
    def axes(self) -> dict[str, int]:
        """The size of every axis of the mesh."""
        names = () if self.mesh is None else self.mesh.mesh_dim_names or ()
        return {} if self.mesh is None else dict(zip(names, self.mesh.shape, strict=True))

    def size_along(self, *axes: str) -> int:
        """The number of ranks along ``axes``."""
        return math.prod(self.axes.get(axis, 1) for axis in axes)

    def rank_along(self, *axes: str) -> int:
        """The position of this rank among those along ``axes``, the first of which is outermost."""
        coordinates = () if self.mesh is None else tuple(self.mesh.get_coordinate() or ())
        place = dict(zip(self.axes, coordinates, strict=True))
        position = 0
        for axis in axes:
            position = position * self.size_along(axis) + place.get(axis, 0)
        return position

    def is_first_of(self, *axes: str) -> bool:
        """Whether this is the first of the ranks that have the same position along ``axes``."""
        return all(self.rank_along(axis) == 0 for axis in self.axes if axis not in axes)

    def along(self, axis: str) -> MeshAxis:
        """The ranks along an axis, which communicate with this one."""
        assert self.mesh is not None
        return MeshAxis(self.mesh[axis])

    def rows_along(self, axis: str) -> list[list[int]]:
        """All ranks, those together that differ along ``axis`` only."""
        assert self.mesh is not None
        by_axis = self.mesh.mesh.movedim([*self.axes].index(axis), -1)
        rows: list[list[int]] = by_axis.flatten(end_dim=-2).tolist()
        return rows

    @property
    def tp(self) -> int:
        """The number of ranks over which every matrix is sharded."""
        return self.size_along("tp")

    @property
    def pp(self) -> int:
        """The number of ranks over which the layers are divided."""
        return self.size_along("pp")

    @property
    def pp_rank(self) -> int:
        """The position of this rank among these."""
        return self.rank_along("pp")

    @property
    def cp(self) -> int:
        """The number of ranks that share each row."""
        return 1 if self.row_group is None else self.row_group.size

    @property
    def data_rank(self) -> int:
        """Which share of the examples belongs to this rank."""
        return self.rank_along(*DATA_AXES) // self.cp

    @property
    def num_data_ranks(self) -> int:
        """The number of shares into which the examples are divided."""
        return self.size_along(*DATA_AXES) // self.cp

    @property
    def is_first_of_share(self) -> bool:
        """Whether this is the first rank that has its share of the examples: of ranks that divide
        the model, or a row, each knows the same of an example, which counts once."""
        is_first = self.row_group is None or self.row_group.rank == 0
        return is_first and self.is_first_of(*DATA_AXES)

    @property
    def num_local_ranks(self) -> int:
        """The number of ranks of this machine, as far as the launcher tells."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.size)) if self.size > 1 else 1

    @property
    def num_nodes(self) -> int:
        """The number of machines, if each has as many ranks as this one."""
        return max(1, self.size // self.num_local_ranks)

    @property
    def has_replicas_only(self) -> bool:
        """Whether there are several ranks, and each has all weights, and rows of its own."""
        is_replica = self.size > 1 and self.size_along("dp_replicate") == self.size
        return is_replica and self.row_group is None

    @property
    def draws(self) -> tuple[int, ...]:
        """For seeds: dropout differs between shares of the examples, parts of a row and stages, not
        on ``tp``."""
        part = 0 if self.row_group is None else self.row_group.rank
        place = (self.data_rank, self.pp_rank, part)
        return place if part else place[:2] if self.pp_rank else place[:1]

    def sums(self, values: Sequence[float]) -> list[float]:
        """Each value summed in float64 over the shares of the examples: ranks with the same share
        have the same value, which counts once."""
        totals = self.summed(torch.tensor(values, dtype=torch.float64))
        return cast("list[float]", totals.tolist())

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """The same for values on a device, without waiting for them."""
        once = values if self.is_first_of_share else torch.zeros_like(values)
        return self._reduced(once, dist.ReduceOp.SUM)

    def totals(self, values: torch.Tensor) -> torch.Tensor:
        """Each value summed over all ranks, on its device."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: Sequence[float]) -> list[float]:
        """The maximum of each value over all ranks, found on the host, while devices compute."""
        maxima = self._reduced(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.MAX)
        return cast("list[float]", maxima.tolist())

    def of_stages(self, value: Any) -> list[Any]:
        """The objects of the ranks over which the layers are divided, in their order."""
        if self.mesh is None or self.pp == 1:
            return [value]
        return _gathered(value, self.pp, self.mesh["pp"].get_group())

    def gathered(self, value: Any) -> list[Any]:
        """The objects of all ranks, in order."""
        return [value] if self.mesh is None else _gathered(value, self.size)

    def from_main(self, value: Any) -> Any:
        """The object of rank 0."""
        if self.mesh is None:
            return value
        objects = [value]
        wait_for_ranks(dist.broadcast_object_list, objects, src=0, group=self.patient)
        return objects[0]

    def on_main(self, compute: Callable[[], T]) -> T:
        """The result of ``compute`` on rank 0, on every rank. The error that it raises is raised on
        every rank; one that is no ``SurefootError``, as the loss of a peer on the others."""
        problem: Exception | None = None
        result = None
        if self.is_main:
            try:
                result = compute()
            except Exception as error:  # whatever it is, the others wait for an answer
                problem = error
        known = problem if problem is None or isinstance(problem, SurefootError) else _failed(0)
        known, result = self.from_main((known, result))
        if known is not None:
            raise _everywhere(known if problem is None else problem)
        return cast(T, result)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A block that meets no other rank: an error in it on one is raised on all, at its end; on
        the others as ``LostPeerError``."""
        if self.mesh is None:
            yield
            return
        problem = None
        try:
            yield
        except Exception as error:  # whatever it is, the others are to leave at the same place
            if is_out_of_memory(error):  # of which a run starts again with less
                raise
            problem = error
        (failed,) = self.largest([_number(self.rank, problem)])
        if failed:
            raise _everywhere(problem or _failed(int(failed) - 1))

    def first_of(self, value: str | None) -> str | None:
        """The first object that is not None, in the order of ranks."""
        return next((of_rank for of_rank in self.gathered(value) if of_rank is not None), None)

    def wait(self) -> None:
        """Wait until every rank is here."""
        if self.mesh is not None:
            wait_for_ranks(dist.barrier, group=self.patient)

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the block on rank 0, then on the others, which find what it has cached. Without a
        common folder, the first rank of each machine caches for those of its own."""
        is_first = self.is_local_main if self.is_apart else self.is_main
        if not is_first:
            self.wait()
        yield
        if is_first:
            self.wait()

    def _reduced(self, values: torch.Tensor, how: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.mesh is not None:
            values = values.clone()
            wait_for_ranks(dist.all_reduce, values, op=how)
        return values


def _number(rank: int, problem: Exception | None) -> float:
    """Of a rank with a problem, which is above that of ranks without."""
    return 0.0 if problem is None else 1.0 + rank


def _failed(rank: int) -> LostPeerError:
    return LostPeerError(f"rank {rank} has failed; the cause is in that rank's own error message")


def _everywhere(error: Exception) -> Exception:
    error.is_everywhere = True  # type: ignore[attr-defined]
    return error


def _gathered(value: Any, count: int, group: dist.ProcessGroup | None = None) -> list[Any]:
    by_rank: list[Any] = [None] * count
    wait_for_ranks(dist.all_gather_object, by_rank, value, group=group)
    return by_rank


ALONE = World()


@contextlib.contextmanager
def joined(section: ParallelSection) -> Iterator[World]:
    """Join the process group of this run, if a launcher has started one; otherwise a single rank.
    Raises ``RunError`` if the axes of the recipe do not give that many ranks, and ``LostPeerError``
    if another rank has died."""
    name_ranks()
    from_launcher = launched()
    rank, size, local = from_launcher or (0, 1, 0)
    _refuse_group(size)
    try:
        section.axes(size)
    except ValueError as error:
        how = "with `surefoot train` or torchrun, " if from_launcher is None else ""
        raise RunError(f"parallel: {error}; start as many, {how}or leave dp_shard unset") from None
    if from_launcher is None:
        yield ALONE
        return
    die_with_launcher()
    if size == 1:
        yield ALONE
        return
    with connected(section, rank, size, local) as world:
        yield world


def gpu_of(local_rank: int, count: int) -> int:
    """The index of a rank's GPU among the ``count`` that it sees. Some launchers show each rank its
    own only: SLURM with --gpus-per-task, Ray, submitit. Raises ``RunError``."""
    if count > 1 and local_rank >= count:  # of those that share one, NCCL finds and names two
        raise RunError(
            f"rank {local_rank} of this machine has no GPU: there are {count}; start at most one "
            "rank for each GPU"
        )
    return local_rank if count > 1 else 0


def _refuse_group(size: int) -> None:
    """Raise ``RunError`` if this program has a process group, which could not serve: the one of
    Ray, for example, is of one backend. To destroy it is for whoever has made it."""
    present = dist.get_world_size() if dist.is_initialized() else 0
    if present and max(present, size) > 1:
        raise RunError(
            f"this program has a process group already, of {counted(present, 'rank')} over "
            f"{dist.get_backend()}; a run makes its own, over gloo between hosts and NCCL between "
            "GPUs. Call torch.distributed.destroy_process_group() before the run, and set "
            "MASTER_PORT to another port that is free on the machine of rank 0, on all ranks"
        )


@contextlib.contextmanager
def connected(section: ParallelSection, rank: int, size: int, local: int = 0) -> Iterator[World]:
    """The process group of ``size`` ranks: NCCL between GPUs, gloo between hosts."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(gpu_of(local, torch.cuda.device_count()))
        # NCCL keeps its last collectives; the watchdog has them written by its pipe.
        stem = f"{tempfile.gettempdir()}/surefoot-{os.environ.get('MASTER_PORT')}"
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{stem}-nccl-rank-")
        os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", f"{stem}-pipe-rank-")
    try:
        with explain_peer_loss(rank):
            with announced(_WAIT, *_waited_for(rank, size), section.join_minutes):
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
                    rank=rank,
                    world_size=size,
                    timeout=timedelta(minutes=section.join_minutes),
                )
            axes = section.axes(size)
            mesh = init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))
            # What one rank does for all may take hours; the timeout of the other group is there to
            # find ranks that hang (docs/decisions/0030).
            patient = wait_for_ranks(dist.new_group, backend="gloo", timeout=_PATIENCE)
            timeout = timedelta(minutes=section.join_minutes)
            world = World(rank, size, mesh, patient, local, timeout)
            yield replace(world, row_group=_row_group(world, section.cp))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _row_group(world: World, size: int) -> RowGroup | None:
    """The ranks that share rows with this one: neighbors along the data axes. A collective call."""
    if size == 1:
        return None
    assert world.mesh is not None
    names = [*world.axes]
    data = [names.index(axis) for axis in DATA_AXES]
    by_data = world.mesh.mesh.movedim(data, [-2, -1]).reshape(-1, size)
    mine = None
    for ranks in cast("list[list[int]]", by_data.tolist()):  # every rank makes all groups
        group = wait_for_ranks(dist.new_group, ranks, timeout=world.timeout)
        if world.rank in ranks:
            mine = RowGroup(ranks.index(world.rank), size, group)
    return mine


def be_patient(world: World) -> World:
    """Let collectives of all groups wait for as long as the main rank may take."""
    assert world.mesh is not None
    # torch 2.14 made it public and deprecated the private name, which is all that 2.13 has.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    rows = [] if world.row_group is None else [world.row_group.group]
    for group in (None, *world.mesh.get_all_groups(), *rows):  # as torchtitan's set_pg_timeouts
        set_timeout(_PATIENCE, group)
    return replace(world, timeout=_PATIENCE)


def _waited_for(rank: int, size: int) -> tuple[str, int, str]:
    """The ranks without which ``rank`` cannot begin, of how many, and where they meet."""
    others = "rank 0" if rank else "rank 1" if size == 2 else f"ranks 1 to {size - 1}"
    return others, size, f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT', '29500')}"


@contextlib.contextmanager
def explain_peer_loss(
    rank: int, received: Callable[[], signal.Signals | None] = lambda: None
) -> Iterator[None]:
    """Convert torch's error about a lost rank to a ``LostPeerError``, which knows whether a signal
    was ``received`` meanwhile."""
    try:
        yield
    except RuntimeError as error:
        if not _is_loss(error):
            raise
        raise LostPeerError(
            f"rank {rank}: lost the connection to another rank ({_short(error)}); the cause is "
            "in that rank's own error message",
            received(),
        ) from error


def _short(error: RuntimeError) -> str:
    """The error, without gloo's source location and its advice."""
    return _PLACE.sub("", str(error)).partition(". This is typically")[0]


def _is_loss(error: RuntimeError) -> bool:
    """Whether a rank has failed only because another one is gone."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


class AgreedShortageError(MemoryError):
    """Memory did not suffice on some rank; all ranks raise this at the same place."""


@contextlib.contextmanager
def vote_on_memory(world: World) -> Iterator[None]:
    """Run a forward pass in the block. Raises ``AgreedShortageError`` on all ranks if one of them
    runs out of memory in it, and as ``World.together`` for any other error. Does nothing unless all
    ranks are replicas.

    A replica has all weights, so its forward pass meets no other rank before gradients are reduced
    in the backward pass. A vote between the two lets all replicas leave the step at the same place.
    Ranks that share weights (``dp_shard``, ``tp``, ``pp``) meet in every layer; for them there is
    no such place.
    """
    if not world.has_replicas_only:
        yield
        return
    shortage = problem = None
    try:
        yield
    except Exception as error:  # such as that of a picture, which is read here
        if is_out_of_memory(error):
            shortage = allocator_message(error)  # alone: its frames hold the tensors of the pass
        else:
            problem = error
    is_short, failed = world.largest([float(shortage is not None), _number(world.rank, problem)])
    if failed:
        raise _everywhere(problem or _failed(int(failed) - 1))
    if is_short:
        raise AgreedShortageError(shortage or "out of memory on another rank")


class Axis(Protocol):
    """One mesh axis, as seen by one of its ranks."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def rank(self) -> int:
        """The position of this rank."""

    def spread(self, whole: nn.Parameter, dim: int | None) -> nn.Parameter:
        """The replacement of ``whole``, which is freed: sharded along ``dim``, or replicated."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor: the sum of all ranks' ``x``."""

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor: the elementwise maximum of all ranks' ``x``."""

    def each(self, x: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' ``x``, which have one shape."""

    def sum_of_mine(self, parts: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``parts[rank]``."""


@dataclass(frozen=True)
class MeshAxis:
    """An axis with real ranks. Parameters that are sharded over it are DTensors."""

    mesh: DeviceMesh  # of one dimension

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """The position of this rank."""
        return self.mesh.get_local_rank()

    def spread(self, whole: nn.Parameter, dim: int | None) -> nn.Parameter:
        """A DTensor; every rank has the same ``whole``."""
        placement = Replicate() if dim is None else Shard(dim)
        values = distribute_tensor(whole.detach(), self.mesh, [placement], src_data_rank=None)
        whole.data = whole.data.new_empty(0)
        return nn.Parameter(values, requires_grad=whole.requires_grad)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """By an all-reduce."""
        return self._reduced(x, dist.ReduceOp.SUM)

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """By an all-reduce."""
        return self._reduced(x, dist.ReduceOp.MAX)

    def each(self, x: torch.Tensor) -> list[torch.Tensor]:
        """By an all-gather."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        wait_for_ranks(dist.all_gather, parts, x, group=self.mesh.get_group())
        return parts

    def sum_of_mine(self, parts: torch.Tensor) -> torch.Tensor:
        """By a reduce-scatter."""
        total = parts.new_empty(1, *parts.shape[1:])
        group = self.mesh.get_group()
        wait_for_ranks(dist.reduce_scatter_tensor, total, parts, group=group)
        return total[0]

    def _reduced(self, x: torch.Tensor, how: dist.ReduceOp.RedOpType) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        wait_for_ranks(dist.all_reduce, total, op=how, group=self.mesh.get_group())
        return total


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of ``tensor``, as a plain tensor that shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
