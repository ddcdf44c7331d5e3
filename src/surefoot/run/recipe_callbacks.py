"""The callbacks of a run: those of its recipe, in addition to the caller's own."""

from __future__ import annotations

from copy import copy

from rich.console import Console

from ..callbacks.console import Screen
from ..callbacks.early_stop import EarlyStop
from ..callbacks.jsonl import NAME as METRICS
from ..callbacks.jsonl import Jsonl
from ..callbacks.plot import NAME as PLOT
from ..callbacks.plot import Plot
from ..callbacks.tensorboard import FOLDER as TENSORBOARD
from ..callbacks.tensorboard import TensorBoard
from ..callbacks.warm_up import WarmUp
from ..errors import RecipeError
from ..parallel.world import ALONE, World
from ..recipe.recipe import Recipe
from ..schema import variant_name
from ..training.callback import TrainerCallback
from ..training.control.triggers import IntervalCallback, Trigger
from ..training.section import CALLBACKS


def standard_callbacks(recipe: Recipe, world: World = ALONE) -> list[TrainerCallback]:
    """The callbacks of the recipe, in the order in which they are called."""
    section, checkpoint, folder = recipe.train, recipe.checkpoint, recipe.train.folder
    members: list[TrainerCallback] = [
        IntervalCallback(
            Trigger(section.log_steps, section.log_minutes, section.log_epoch),
            Trigger(section.eval_steps, section.eval_minutes, section.eval_epoch),
            Trigger(checkpoint.save_steps, checkpoint.save_minutes, checkpoint.save_epoch),
        )
    ]
    if section.early_stopping_patience is not None:
        members.append(EarlyStop(section.early_stopping_patience, section.early_stopping_threshold))
    for callback in section.callbacks:
        if not isinstance(callback, TrainerCallback):
            name = variant_name(CALLBACKS, callback)
            raise RecipeError(f"train.callbacks: {name} is no surefoot.training.TrainerCallback")
        members.append(copy(callback))  # what a run changes is its own
    if not world.is_main:
        return members
    members += [Jsonl(folder / METRICS), Screen(Console(stderr=True)), Plot(folder / PLOT)]
    if recipe.model.compile:
        members.append(WarmUp())
    if "tensorboard" in section.report_to:
        members.append(TensorBoard(folder / TENSORBOARD))
    return members
