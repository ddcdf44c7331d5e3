"""The size of a save, from the model on fake tensors: dtypes, shapes and names are enough."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.saving.preparation import prepare
from ...checkpoint.state.states import RandomState
from ...data.text.codec import Codec
from ...model.base_identity import BaseModel
from ...run.assembly import build_saver
from ...training.callback import TrainerState
from .dry_run import DryRunModel, optimizer_state
from .size import CheckpointSize, checkpoint_size

RECORD = {  # a line of the history that every checkpoint carries, of a usual length
    "step": 1000,
    "epoch": 1.2345678901234567,
    "loss": 1.2345678901234567,
    "grad_norm": 0.12345678901234567,
    "learning_rate": 1.2345678901234567e-05,
    "num_input_tokens_seen": 12345678,
    "tokens_per_second": 12345.678901234567,
}


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


def size_of_checkpoint(
    skeleton: DryRunModel, codec: Codec, base: Path, *, num_logs: int
) -> CheckpointSize:
    """The size of a checkpoint of the run, at its end, with ``num_logs`` records in it."""
    recipe, state = skeleton.recipe, optimizer_state(skeleton)
    saver = build_saver(recipe, skeleton.network, codec, BaseModel(recipe.model, base))
    job, live = prepare(
        recipe.train.folder,
        0,
        {
            "model": _Held(_plain(skeleton.network.weights.state_dict())),
            "optimizer": _Held({name: _plain(held) for name, held in state.items()}),
            "trainer": TrainerState(),
            "random": RandomState(),
        },
        kind=skeleton.network.weights.kind,
        companions=saver.companions,
        max_shard_size=recipe.checkpoint.max_shard_size,
        crew=saver.writers,
    )
    job = replace(job, share=recipe.checkpoint.share_unchanged)
    frozen = live.groups["model"].keys() - frozenset[str]().union(*skeleton.turns)
    record = len(json.dumps(RECORD)) + len(json.dumps(RECORD, indent=2))  # in two files
    return checkpoint_size(job, frozen, log=num_logs * record)
