"""The recipe's ``parallel`` section."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ParallelSection:
    """Over how many processes a run is spread. May change between two starts of one run."""

    num_processes: int | None = None
    """Processes that ``surefoot train`` starts on this machine; unset, one for each GPU, or one.
    Under ``torchrun`` or SLURM the processes that are there are taken."""
    dp_replicate: int = 1
    """So many copies of the model, each over ``dp_shard`` processes. All of them: plain data
    parallelism."""
    dp_shard: int | None = None
    """Over so many processes weights, gradients and optimizer states are sharded; unset, over all
    that ``dp_replicate`` and ``tp`` leave."""
    tp: int = 1
    """Over so many processes every matrix is cut, and these work on the same examples together
    (tensor parallelism). Best within one machine."""
    sequence_parallel: bool = False
    """Cut activations between the matrices along the sequence, over the ``tp`` processes: less
    memory for as much communication."""
    reshard_after_forward: bool = True
    """Gather a layer's weights again for the backward pass: less memory, more communication."""
    max_restarts: int = 0
    """How often the processes of this machine are started again after one has died; they go on from
    the last checkpoint."""
    timeout_minutes: float = 10.0
    """How long a process waits for another one before it gives up."""

    def __post_init__(self) -> None:
        for name in ("num_processes", "dp_replicate", "dp_shard", "tp"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must not be negative, got {self.max_restarts}")
        if self.timeout_minutes <= 0:
            raise ValueError(f"timeout_minutes must be positive, got {self.timeout_minutes}")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp of at least 2, got 1")
        self.axes(self.num_processes) if self.num_processes is not None else None

    def axes(self, world_size: int) -> tuple[int, int, int]:
        """``dp_replicate``, ``dp_shard`` and ``tp`` for so many processes; a ``ValueError`` if they
        do not make that many."""
        shard = self.dp_shard or max(1, world_size // (self.dp_replicate * self.tp))
        if self.dp_replicate * shard * self.tp != world_size:
            raise ValueError(
                f"dp_replicate x dp_shard x tp is {self.dp_replicate} x {shard} x {self.tp}, "
                f"but there are {world_size} processes"
            )
        return self.dp_replicate, shard, self.tp
