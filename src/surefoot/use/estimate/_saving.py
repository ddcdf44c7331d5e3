"""The size of a save, from the model on fake tensors: dtypes, shapes and names are enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...checkpoint.disk.retention import RetentionPolicy, decide
from ...checkpoint.saving.preparation import prepare
from ...checkpoint.state.roles import FileRole
from ...checkpoint.state.states import RandomState
from ...run.assembly import build_saver
from ...training.callback import TrainerState
from ._dry_run import DryRunModel, optimizer_state


@dataclass(frozen=True)
class _Held:
    """A state that already exists."""

    state: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state.update(state)


def _plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the same types and shapes, of a kind that can be stored: one element each."""
    return {
        name: torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
        for name, tensor in tensors.items()
    }


# Usual bytes of a tensor in the manifest, beside its name, which is there twice; of a file there;
# and of a record of the history in the two files with it.
_OF_TENSOR, _OF_FILE, _OF_RECORD = 180, 200, 450


def size_of_checkpoint(dry_run: DryRunModel, *, num_logs: int) -> CheckpointSize:
    """The size of a checkpoint of the run, at its end, with ``num_logs`` records in it."""
    parts, state = dry_run.parts, optimizer_state(dry_run)
    saver = build_saver(parts, dry_run.network)
    job, live = prepare(
        parts.train.folder,
        0,
        {
            "model": _Held(_plain(dry_run.network.weights.state_dict())),
            "optimizer": _Held({name: _plain(tensors) for name, tensors in state.items()}),
            "trainer": TrainerState(),
            "random": RandomState(),
        },
        kind=dry_run.network.weights.kind,
        companions=saver.companions,
        max_shard_size=parts.saves.max_shard_size,
        writers=saver.writers,
    )
    never_updated = live.groups["model"].keys() - frozenset[str]().union(*dry_run.turns)
    weights, optimizer, unchanging = 0, 0, 0
    rest = sum(map(len, job.small.values())) + num_logs * _OF_RECORD
    rest += _OF_FILE * (len(job.small) + len(job.shards))
    for shard in job.shards:
        role, num_bytes = FileRole(shard.role), shard.plan.header.file_size
        weights += num_bytes if role.is_weights else 0
        optimizer += num_bytes if role.is_optimizer else 0
        rest += num_bytes if role.is_of_rank_0 else 0
        rest += sum(_OF_TENSOR + 2 * len(name) for name in shard.plan.header.entries)
        if role.is_weights and shard.plan.header.entries.keys() <= never_updated:
            unchanging += num_bytes
    return CheckpointSize(
        weights, optimizer, rest, unchanging if parts.saves.share_unchanged else 0
    )


@dataclass(frozen=True)
class CheckpointSize:
    """Bytes of one checkpoint."""

    weights: int
    optimizer: int
    rest: int  # other states, tokenizer, configuration, manifest
    unchanging: int  # of files that checkpoints share

    @property
    def total(self) -> int:
        """All of its files."""
        return self.weights + self.optimizer + self.rest


def snapshot_size(size: CheckpointSize, num_processes: int, *, is_adapter: bool) -> int:
    """Shared memory of the rank with the largest snapshot: its own part of an asynchronous save.
    Rank 0 writes a complete adapter, and all small files."""
    share = size.optimizer + (0 if is_adapter else size.weights)
    return -(-share // num_processes) + (size.weights if is_adapter else 0)


def saved_steps(
    *, steps: int, steps_per_epoch: int, save_steps: int | None, save_epoch: bool
) -> list[int]:
    """The steps at which a run saves, including the last one, without saves by time."""
    saved_at = {steps}
    if save_steps:
        saved_at |= set(range(save_steps, steps, save_steps))
    if save_epoch:
        saved_at |= set(range(steps_per_epoch, steps, steps_per_epoch))
    return sorted(saved_at)


def most_at_once(saves: Sequence[int], rule: RetentionPolicy, num_best: int) -> int:
    """The number of checkpoints on the disk at the worst moment, including the one being written.
    The best ones (``num_best``) may be older than those that are kept for another reason. Ages
    (``keep_hours``) are not known: all count as young."""
    if rule.keep is None:
        return len(saves)
    retained: Mapping[int, float | None] = {}
    most = 0
    for step in saves:
        coming = {**retained, step: None}
        most = max(most, len(coming))
        retained = {v.step: None for v in decide(coming, rule, now=0.0) if v.stays}
    return min(most + num_best, len(saves))


def disk_needed(size: CheckpointSize, count: int, saves: int, most_sharing: int) -> int:
    """Bytes of ``count`` of ``saves`` checkpoints on the disk. One copy of the unchanging files is
    shared by up to ``most_sharing`` in a row."""
    copies = -(-saves // most_sharing)
    if count < saves:  # they may begin in the middle of those that share one
        copies = min(copies, 1 - (1 - count) // most_sharing)
    return size.unchanging * copies + (size.total - size.unchanging) * count
