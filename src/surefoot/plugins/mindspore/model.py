"""Models to and from MindSpore Transformers: its names, and the files of its ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.disk.folder import TRAINER_STATE, FolderWeights, open_checkpoint
from ...checkpoint.layouts.detection import has_manifest, open_contents
from ...checkpoint.layouts.layout import Layout
from ...checkpoint.sources import FolderSource, JoinedSource, Renamed, TensorsInMemory, TensorSource
from ...errors import CheckpointError
from ...storage import files
from .naming import (
    AttentionHeads,
    family_of,
    heads_near,
    to_huggingface,
    to_mindspore,
    usual,
)
from .opening import (
    MindSpore,
    form_of,
    open_mindspore_state,
    open_mindspore_weights,
    progress_of,
    role_of,
)
from .reading import KEEP

logger = logging.getLogger(__name__)
_ROLES = ("model", "optimizer", "state")
_NUMBERS = ("epoch_num", "step_num", "loss_scale", "global_batch_size")  # of common.json
_MOMENTS = {"adam_m.": "exp_avg", "adam_v.": "exp_avg_sq"}


def open_state(folder: Path, base: Path | None, layout: MindSpore) -> TensorSource:
    """All that MindSpore saved, by its names: weights, moments, numbers of the training state.
    ``base`` is the same model as Hugging Face has it, if its configuration is not near."""
    with files.raising(CheckpointError, f"cannot read {folder}"):
        locations = open_mindspore_state(folder, layout.slicing(base))
        progress = progress_of(folder) if form_of(folder) == "iteration" else {}
    source = FolderSource(FolderWeights(MindSpore.name, folder, locations))
    numbers = {
        name: torch.tensor(progress[name])
        for name in _NUMBERS
        if isinstance(progress.get(name), int | float) and name not in locations
    }
    return JoinedSource([("", source), ("", TensorsInMemory(numbers))]) if numbers else source


def open_named(
    layout: Layout, folder: Path, base: Path | None, *, is_checked: bool
) -> TensorSource:
    """The weights in a folder, under Hugging Face's names, as the lists of plugins open it.
    ``base`` says how many heads there are, and the shapes of ranks' tensors."""
    assert isinstance(layout, MindSpore)
    weights = open_mindspore_weights(folder, layout.slicing(base))
    return as_huggingface(FolderSource(weights, is_checked), folder, base, layout)


def by_role(source: TensorSource) -> dict[str, TensorSource]:
    """MindSpore's tensors, separated into model, optimizer and state."""
    names_by_role: dict[str, dict[str, str]] = {role: {} for role in _ROLES}
    for name, shape in source.shapes().items():
        names_by_role[role_of(name, shape)][name] = name
    return {role: Renamed(source, names) for role, names in names_by_role.items()}


def as_huggingface(
    source: TensorSource, folder: Path, base: Path | None, layout: MindSpore
) -> TensorSource:
    """``source``, which came from ``folder``, under Hugging Face's names."""
    family = layout.options.names or family_of(source.shapes())
    if family in (None, KEEP):
        return source
    return to_huggingface(source, family or "", heads_near(folder, base))


def as_mindspore(
    source: TensorSource, family: str | None, heads: AttentionHeads | None
) -> TensorSource:
    """Weights and moments with Hugging Face's names under a family's; None: the usual one."""
    if family == KEEP:
        return source
    return to_mindspore(source, family or usual(source.shapes()), heads)


def moments_of(model: TensorSource, folder: Path) -> list[tuple[str, TensorSource]]:
    """The moments in a run's checkpoint, with MindSpore's prefixes; none of an adapter."""
    if not has_manifest(folder) or open_checkpoint(folder).manifest.is_adapter:
        return []
    stored = FolderSource(open_contents(folder, ("optimizer",)))
    slots = tuple(f".{key}" for key in _MOMENTS.values())
    owners = {
        name.removeprefix("optimizer/").rpartition(".")[0]
        for name in stored.shapes()
        if name.startswith("optimizer/") and name.endswith(slots)
    }
    if odd := sorted(owners - model.shapes().keys()):
        logger.warning(
            "%s: the moments of %s belong to several tensors that are separate in files, so "
            "they are not written; the result contains weights only",
            *(folder, odd[0]),
        )
        return []
    moments: list[tuple[str, TensorSource]] = []
    for prefix, key in _MOMENTS.items():
        names = {name: f"optimizer/{name}.{key}" for name in model.shapes()}
        stored_names = {name: full for name, full in names.items() if full in stored.shapes()}
        if stored_names:
            moments.append((prefix, Renamed(stored, stored_names)))
    return moments


def numbers_of(folder: Path, global_batch_size: int | None) -> TensorsInMemory:
    """The numbers of a Surefoot checkpoint with which MindSpore Transformers resumes."""
    checkpoint = open_checkpoint(folder)
    trainer_state: Mapping[str, Any] = {}
    if TRAINER_STATE in checkpoint.manifest.files:
        trainer_state = json.loads(checkpoint.small(TRAINER_STATE))
    step, epoch = checkpoint.manifest.step, trainer_state.get("epoch")
    numbers = {
        "epoch_num": torch.tensor(int(epoch) if isinstance(epoch, int | float) else 0),
        "step_num": torch.tensor(step),
        # Types and shapes are MindSpore's: this number is an int32 in a
        # list, the others have no dimension.
        "global_step": torch.tensor([step], dtype=torch.int32),
        "loss_scale": torch.tensor(1.0),
    }
    if global_batch_size is not None:
        numbers["global_batch_size"] = torch.tensor(global_batch_size)
    return TensorsInMemory(numbers)
