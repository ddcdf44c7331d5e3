"""``optimizer.pt``: moments by the numbers of parameters, in the Trainer's order.

The Trainer numbers the trainable parameters: first those with weight decay, then the others, each
in the order of ``named_parameters``. The file does not contain this order. Everything that can be
checked is checked: how many there are in each group, their shapes, and which tensors each has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from ...errors import CheckpointError

Moments = dict[str, dict[str, torch.Tensor]]
KEYS = {"step", "exp_avg", "exp_avg_sq"}
# Trainer.get_decay_parameter_names, of transformers 5, and as it was until 4.49
NO_DECAY = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
NO_DECAY_OF_OLD = (r"bias",)


def trainer_groups(model: nn.Module, patterns: Sequence[str] = NO_DECAY) -> list[list[str]]:
    """The trainable parameters of ``model``, as the Trainer groups and orders them."""
    decays = set(get_parameter_names(model, [nn.LayerNorm], list(patterns)))
    learns = [name for name, p in model.named_parameters() if p.requires_grad]
    return [[n for n in learns if n in decays], [n for n in learns if n not in decays]]


def moments_by_name(saved: object, model: nn.Module, where: Path) -> Moments:
    """AdamW's state of every trainable parameter of ``model``, by its name in the model."""
    numbers, state = _taken_apart(saved, where)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    reason = ""
    given = [name for name, p in model.named_parameters() if p.requires_grad]  # an own optimizer
    for groups in (trainer_groups(model), trainer_groups(model, NO_DECAY_OF_OLD), [given]):
        if [len(g) for g in groups if g] != [len(n) for n in numbers if n]:
            continue
        names = [name for group in groups for name in group]
        order = [number for group in numbers for number in group]
        found = {name: state.get(number, {}) for name, number in zip(names, order, strict=True)}
        problems = ((name, _problem(found[name], shapes[name])) for name in names)
        problem = next((f"{name}: {why}" for name, why in problems if why), None)
        if problem is None:
            return {name: _plain(values) for name, values in found.items()}
        reason = reason or problem
    raise CheckpointError(f"{where}: {reason or _count(numbers, model)}; {_ADVICE}")


_ADVICE = "set the model and method of the checkpoint in the recipe"


def _taken_apart(saved: object, where: Path) -> tuple[list[list[int]], Mapping[int, Any]]:
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    state = saved.get("state") if isinstance(saved, dict) else None
    if not isinstance(groups, list) or not isinstance(state, dict):
        raise CheckpointError(f"{where}: it is not the state of a torch optimizer")
    numbers = [group.get("params") if isinstance(group, dict) else None for group in groups]
    if not all(isinstance(n, list) and all(type(i) is int for i in n) for n in numbers):
        raise CheckpointError(f"{where}: it is not the state of a torch optimizer")
    if not state:
        raise CheckpointError(f"{where}: it contains no moments; resume from another checkpoint")
    return [list(found or ()) for found in numbers], state


def _problem(values: object, shape: torch.Size) -> str | None:
    """Why ``values`` cannot be the state of a parameter of ``shape``."""
    if not isinstance(values, dict) or not values:
        return "it is trainable, but has no moments in the file"
    if values.keys() != KEYS:
        names = ", ".join(sorted(map(str, values)))[:200]
        return (
            f"it contains {names}, expected {', '.join(sorted(KEYS))}: only AdamW's state can "
            "be resumed"
        )
    for name, expected in (("exp_avg", shape), ("exp_avg_sq", shape), ("step", torch.Size())):
        found = values[name]
        if name == "step" and type(found) in (int, float):
            continue
        if not isinstance(found, torch.Tensor):
            return f"its {name} is of type {type(found).__name__}, expected a tensor"
        if found.shape != expected or found.layout != torch.strided or found.is_complex():
            return f"its {name} is {list(found.shape)}, expected {list(expected)}"
    return None


def _plain(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """With the number of updates in torch's present form."""
    step = torch.as_tensor(values["step"], dtype=torch.float32)
    return {"step": step, "exp_avg": values["exp_avg"], "exp_avg_sq": values["exp_avg_sq"]}


def _count(numbers: Sequence[Sequence[int]], model: nn.Module) -> str:
    found = " and ".join(str(len(group)) for group in numbers)
    wanted = " and ".join(str(len(group)) for group in trainer_groups(model))
    return (
        f"it contains the moments of {found} parameters (with decay and without), but {wanted} "
        "are trainable in this run"
    )


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
