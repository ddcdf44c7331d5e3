"""A checkpoint of Hugging Face's Trainer: its files, ``trainer_state.json``, ``optimizer.pt``.

It is detected by names alone. The Trainer writes it in place without flushing, so it may be
incomplete. A missing file is an error, never a silent fresh start.

``optimizer.pt`` has moments by the numbers of parameters: the Trainer numbers the trainable ones,
first those with weight decay, then the others, each in the order of ``named_parameters``. The file
does not contain this order. Everything that can be checked is checked: how many there are in each
group, their shapes, and which tensors each has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from ...checkpoint.disk import strict_json
from ...checkpoint.disk.commit import step_of
from ...checkpoint.disk.folder import TrainerStateFile, number
from ...checkpoint.disk.manifest import MANIFEST
from ...checkpoint.disk.manifest import STATE as SKELETON
from ...errors import CheckpointError
from ...storage import files

OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
SCALER = "scaler.pt"
STATE = "trainer_state.json"
_ARGUMENTS = "training_args.bin"  # a pickled object of theirs; never read, never needed
_OURS = (MANIFEST, SKELETON, "recipe.yaml", "optimizer.safetensors")  # in no folder of theirs
_SHARDED = {  # states of several processes, by the names only they use
    "latest": "DeepSpeed",
    "zero_to_fp32.py": "DeepSpeed",
    "optimizer_0": "FSDP",
    "optimizer.bin": "FSDP",
    "pytorch_model_fsdp_0": "FSDP",
    "pytorch_model_fsdp.bin": "FSDP",
}
Moments = dict[str, dict[str, torch.Tensor]]
_OF_ADAMW = {"step", "exp_avg", "exp_avg_sq"}
# Trainer.get_decay_parameter_names, of transformers 5, and as it was until 4.49
_NO_DECAY = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
_NO_DECAY_OF_OLD = (r"bias",)


def is_trainer_checkpoint(folder: Path) -> bool:
    """Whether ``folder`` is a checkpoint of the Trainer, complete or not. By names alone."""
    if any(files.exists(folder / name) for name in _OURS):
        return False
    return any(files.exists(folder / name) for name in (STATE, _ARGUMENTS, OPTIMIZER))


def pickles_in(folder: Path) -> list[str]:
    """The pickles that a resume from ``folder`` would read."""
    names = (OPTIMIZER, SCHEDULER, SCALER)
    return [name for name in names if files.exists(folder / name)]


def refuse_incomplete(folder: Path) -> None:
    """Raise ``CheckpointError`` if ``folder`` lacks what a resume needs."""
    field = "adapter" if files.exists(folder / "adapter_config.json") else "path"
    from_scratch = (
        "to start a new run from its weights, with a fresh optimizer, remove checkpoint.resume "
        f"and set model.{field}={folder}"
    )
    for name, program in _SHARDED.items():
        if files.exists(folder / name):
            raise CheckpointError(
                f"{folder}: its {name} is the sharded state of a {program} run, which cannot be "
                f"resumed here; {from_scratch}"
            )
    if not files.exists(folder / STATE):
        raise CheckpointError(
            f"{folder}: it has no {STATE}, which the Trainer writes last, so the save was "
            "interrupted; resume from an earlier checkpoint"
        )
    if not files.exists(folder / OPTIMIZER):
        raise CheckpointError(
            f"{folder}: no {OPTIMIZER} (saved with save_only_model?), so Adam's moments are "
            f"missing and the run cannot be resumed; {from_scratch}"
        )


@dataclass(frozen=True)
class TrainerProgress:
    """The part of ``trainer_state.json`` that a Surefoot run imports."""

    global_step: int
    epoch: float
    max_steps: int
    best_metric: float | None
    best_global_step: int | None
    num_input_tokens_seen: int
    total_flos: float
    log_history: list[dict[str, float]]

    @property
    def train_loss_total(self) -> float:
        """Sum of all losses, from logged means; steps after the last log count as before it."""
        logged = [
            (int(r["step"]), r["loss"])
            for r in self.log_history
            if math.isfinite(r.get("step", math.nan)) and math.isfinite(r.get("loss", math.nan))
        ]
        total, before, loss = 0.0, 0, 0.0
        for step, loss in logged:
            total += loss * max(0, step - before)
            before = step
        return total + loss * max(0, self.global_step - before)


def read_progress(folder: Path) -> TrainerProgress:
    """``trainer_state.json``. Raises ``CheckpointError`` if it is incomplete or of another step."""
    where = folder / STATE
    with files.raising(CheckpointError), files.open_file(where) as file:
        data = files.read_all(file, strict_json.MAX_BYTES)
    try:  # with NaN and Infinity, which the Trainer writes and JSON does not support
        content = strict_json.parse_object(data, str(where), allow_nan=True)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}: the save was interrupted; resume from an earlier checkpoint"
        ) from None
    log = content.get("log_history") or []
    if not isinstance(log, list) or not all(isinstance(record, dict) for record in log):
        raise CheckpointError(f"{where}: log_history must be a list of objects")
    best = number(content.get("best_metric"))  # an infinity before the first finite one
    progress = TrainerProgress(
        global_step=_count(content, "global_step", where),
        epoch=_number(content, "epoch", where),
        max_steps=_count(content, "max_steps", where, 0),
        best_metric=best if best is not None and math.isfinite(best) else None,
        best_global_step=TrainerStateFile.of(content).best_step,
        num_input_tokens_seen=_count(content, "num_input_tokens_seen", where, 0),
        total_flos=_number(content, "total_flos", where, 0),
        log_history=[{k: v for k, v in r.items() if type(v) in (int, float)} for r in log],
    )
    # -1: any other name may be the user's choice.
    if step_of(folder) not in (-1, progress.global_step):
        raise CheckpointError(
            f"{where}: it is of step {progress.global_step}, but the folder is {folder.name}: "
            "two saves are mixed in it, or it was renamed; resume from another checkpoint"
        )
    return progress


def _number(
    content: Mapping[str, Any], name: str, where: Path, default: float | None = None
) -> float:
    value = default if content.get(name) is None else content[name]
    # The bounds refuse NaN and infinity, which the Trainer writes into its JSON.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
        raise CheckpointError(f"{where}: {name} must be a number, found {str(value)[:40]!r}")
    return value


def _count(content: Mapping[str, Any], name: str, where: Path, default: float | None = None) -> int:
    value = _number(content, name, where, default)
    if value != int(value):
        raise CheckpointError(f"{where}: {name} must be a whole number, found {value}")
    return int(value)


def trainer_groups(model: nn.Module, patterns: Sequence[str] = _NO_DECAY) -> list[list[str]]:
    """The trainable parameters of ``model``, as the Trainer groups and orders them."""
    decays = set(get_parameter_names(model, [nn.LayerNorm], list(patterns)))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    return [[n for n in trained if n in decays], [n for n in trained if n not in decays]]


def moments_by_name(saved: object, model: nn.Module, where: Path) -> Moments:
    """AdamW's state of every trainable parameter of ``model``, by its name in the model.

    The file has numbers and no names. So its groups are compared with those of each known way to
    number parameters, and the first one whose moments have the shapes of the parameters is right.
    """
    numbers, state = _numbers_and_state(saved, where)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    groups_of_now = trainer_groups(model)
    # Until 4.49 the Trainer let norms decay. An optimizer of the user's own may have one group.
    in_one_group = [name for name, p in model.named_parameters() if p.requires_grad]
    problems = []
    for groups in (groups_of_now, trainer_groups(model, _NO_DECAY_OF_OLD), [in_one_group]):
        if [len(names) for names in groups if names] != [len(group) for group in numbers if group]:
            continue
        in_order = zip(chain(*groups), chain(*numbers), strict=True)
        moments = {name: state.get(number, {}) for name, number in in_order}
        wrong = {name: _problem(values, shapes[name]) for name, values in moments.items()}
        if not any(wrong.values()):
            return {name: _in_torchs_form(values) for name, values in moments.items()}
        problems.append(next(f"{name}: {why}" for name, why in wrong.items() if why))
    stored, trainable = (
        " and ".join(str(len(group)) for group in groups) for groups in (numbers, groups_of_now)
    )
    other_sizes = (
        f"it contains the moments of {stored} parameters (with decay and without), but "
        f"{trainable} are trainable in this run"
    )
    raise CheckpointError(
        f"{where}: {problems[0] if problems else other_sizes}; set the model and method of the "
        "checkpoint in the recipe"
    )


def _numbers_and_state(saved: object, where: Path) -> tuple[list[list[int]], Mapping[int, Any]]:
    """The numbers of each group's parameters, and the state by number."""
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    state = saved.get("state") if isinstance(saved, dict) else None
    if isinstance(groups, list) and isinstance(state, dict):
        numbers = [group.get("params") if isinstance(group, dict) else None for group in groups]
        if all(isinstance(n, list) and all(type(i) is int for i in n) for n in numbers):
            if not state:
                raise CheckpointError(
                    f"{where}: it contains no moments; resume from another checkpoint"
                )
            return [list(group or ()) for group in numbers], state
    raise CheckpointError(f"{where}: it is not the state of a torch optimizer")


def _problem(values: object, shape: torch.Size) -> str | None:
    """Why ``values`` cannot be the state of a parameter of ``shape``."""
    if not isinstance(values, dict) or not values:
        return "it is trainable, but has no moments in the file"
    if values.keys() != _OF_ADAMW:
        names = ", ".join(sorted(map(str, values)))[:200]
        return (
            f"it contains {names}, expected {', '.join(sorted(_OF_ADAMW))}: only AdamW's state can "
            "be resumed"
        )
    for name, expected in (("exp_avg", shape), ("exp_avg_sq", shape), ("step", torch.Size())):
        value = values[name]
        if name == "step" and type(value) in (int, float):
            continue
        if not isinstance(value, torch.Tensor):
            return f"its {name} is of type {type(value).__name__}, expected a tensor"
        if value.shape != expected or value.layout != torch.strided or value.is_complex():
            return f"its {name} is {list(value.shape)}, expected {list(expected)}"
    return None


def _in_torchs_form(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The number of updates is a tensor in today's torch."""
    return {**values, "step": torch.as_tensor(values["step"], dtype=torch.float32)}


def moments_by_number(
    moments: Mapping[str, Mapping[str, torch.Tensor]],
    groups: Sequence[Sequence[str]],
    settings: Sequence[Mapping[str, object]],
) -> dict[str, Any]:
    """The content of ``optimizer.pt`` for ``trainer_groups``, each with its settings."""
    names = [name for group in groups for name in group]
    numbers = iter(range(len(names)))
    return {
        "state": {i: dict(moments[name]) for i, name in enumerate(names) if moments.get(name)},
        "param_groups": [
            {**setting, "params": [next(numbers) for _ in group]}
            for group, setting in zip(groups, settings, strict=True)
        ],
    }
