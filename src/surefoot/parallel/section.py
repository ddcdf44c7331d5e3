"""The recipe's ``parallel`` section."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Annotated, Literal

from ..schema import FREE, Needs, must
from .sharding import AXES, DATA_AXES

ScheduleName = Literal["1f1b", "interleaved", "gpipe"]


@dataclass(frozen=True, kw_only=True)
class ParallelSection:
    """The mesh of ranks over which a run is sharded. May change between two launches of one run."""

    num_processes: int | None = None
    """Ranks that ``surefoot train`` and ``predict`` start on this machine; unset, one for each
    GPU, or one. Under ``torchrun`` or SLURM the existing ranks are used."""
    dp_replicate: int = 1
    """Number of replicas of the model, each over ``dp_shard`` ranks. With all ranks: plain data
    parallelism."""
    dp_shard: int | None = None
    """Number of ranks over which weights, gradients and optimizer states are sharded (FSDP);
    unset, all that the other axes leave."""
    tp: int = 1
    """Number of ranks over which every matrix is sharded; they compute the same examples
    together (tensor parallelism). Best within one machine."""
    sequence_parallel: bool = False
    """Shard activations between the matrices along the sequence, over the ``tp`` ranks: less
    memory for as much communication."""
    cp: int = 1
    """Number of neighboring data-parallel ranks that share each packed row, and have some of its
    tokens each (context parallelism): for documents that are too long for one rank. Divides
    ``dp_replicate`` times ``dp_shard``."""
    pp: int = 1
    """Number of ranks over which the layers are divided; micro-batches pass from one to the next
    (pipeline parallelism). The axis for slow connections, between machines."""
    pp_schedule: Annotated[ScheduleName, Needs("pp", above=1)] = "1f1b"
    """Pipeline schedule. ``1f1b``: each backward pass as early as possible; ``interleaved``: the
    same with several stages per rank, which idles less and communicates more; ``gpipe``: all
    forward passes first."""
    pp_stages_per_rank: int | None = None
    """Pipeline stages per rank; unset, 2 if ``interleaved``, otherwise 1."""
    reshard_after_forward: Annotated[bool, FREE] = True
    """Gather a layer's weights again for the backward pass: less memory, more communication."""
    max_restarts: Annotated[int, FREE] = 0
    """How often the ranks of this machine are restarted after one has died; they resume from the
    latest checkpoint."""
    timeout: Annotated[float | Literal["auto"], FREE] = "auto"
    """Minutes without progress after which the run ends, and names the rank that hangs. ``auto``:
    ten times the slowest step so far, at least 2; longer to start, evaluate and save."""

    def __post_init__(self) -> None:
        must(self, "be at least 1", "num_processes", *AXES, "cp", "pp_stages_per_rank")
        must(self, "not be negative", "max_restarts")
        if self.timeout != "auto":
            must(self, "be positive", "timeout")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp of at least 2, got 1")
        if self.pp_schedule != "interleaved" and (self.pp_stages_per_rank or 1) > 1:
            raise ValueError(
                f"pp_stages_per_rank: {self.pp_stages_per_rank} stages per rank need "
                f"pp_schedule: interleaved, not {self.pp_schedule}"
            )
        if self.num_processes is not None:
            self.axes(self.num_processes)  # which refuses what does not fit

    @property
    def join_minutes(self) -> float:
        """How long a rank waits for the others to start."""
        return 10.0 if self.timeout == "auto" else self.timeout

    @property
    def num_parts(self) -> int:
        """Pipeline stages per rank."""
        return self.pp_stages_per_rank or (2 if self.pp_schedule == "interleaved" else 1)

    def axes(self, world_size: int) -> dict[str, int]:
        """The size of each of the ``AXES``; ``ValueError`` if they, or ``cp``, do not fit."""
        sizes: dict[str, int] = {axis: getattr(self, axis) or 1 for axis in AXES}
        if self.dp_shard is None:
            sizes["dp_shard"] = max(1, world_size // math.prod(sizes.values()))
        if math.prod(sizes.values()) != world_size:
            raise ValueError(
                f"{' x '.join(AXES)} is {' x '.join(map(str, sizes.values()))}, but there "
                f"{'is 1 process' if world_size == 1 else f'are {world_size} processes'}"
            )
        if (count := math.prod(sizes[axis] for axis in DATA_AXES)) % self.cp:
            raise ValueError(
                f"cp is {self.cp}, which does not divide {' x '.join(DATA_AXES)}, here {count}"
            )
        return sizes

    def num_data_ranks(self, world_size: int) -> int:
        """Into how many shares the examples are divided; raises as ``axes``."""
        sizes = self.axes(world_size)
        return math.prod(sizes[axis] for axis in DATA_AXES) // self.cp


# What launchers call rank, number of ranks, and rank on this machine: torchrun's names and SLURM's.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # of SLURM: "8(x2),4" is 8 on two machines, 4 on one


def name_ranks(environment: MutableMapping[str, str] = os.environ) -> None:
    """Give a rank that SLURM has started torchrun's names, by which the log, the commands and the
    libraries know ranks."""
    has_names = all(name in environment for name in _LAUNCHERS[0])  # srun may start torchrun
    if has_names or (place := launched(environment)) is None:
        return
    environment.update(zip(_LAUNCHERS[0], map(str, place), strict=True))
    tasks, node = environment.get("SLURM_STEP_TASKS_PER_NODE"), environment.get("SLURM_NODEID")
    if tasks is not None and node is not None:
        counts = [n for n, times in _TASKS.findall(tasks) for _ in range(int(times or 1))]
        environment["LOCAL_WORLD_SIZE"] = counts[int(node)]
    elif "SLURM_NTASKS_PER_NODE" in environment:
        environment["LOCAL_WORLD_SIZE"] = environment["SLURM_NTASKS_PER_NODE"]


def launched(environment: Mapping[str, str] = os.environ) -> tuple[int, int, int] | None:
    """Rank, world size and local rank, if a launcher has started this process."""
    for names in _LAUNCHERS:
        if all(name in environment for name in names) and environment.get("MASTER_ADDR"):
            rank, size, local = (int(environment[name]) for name in names)
            return rank, size, local
    return None
