"""The ranks that a launcher has started, by the environment: torchrun's names and SLURM's."""

from __future__ import annotations

import os
from collections.abc import Mapping

# What launchers call rank, number of ranks, and rank on this machine: torchrun's names and SLURM's.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


def launched(environment: Mapping[str, str] = os.environ) -> tuple[int, int, int] | None:
    """Rank, world size and local rank, if a launcher has started this process."""
    for names in _LAUNCHERS:
        if all(name in environment for name in names) and environment.get("MASTER_ADDR"):
            rank, size, local = (int(environment[name]) for name in names)
            return rank, size, local
    return None
