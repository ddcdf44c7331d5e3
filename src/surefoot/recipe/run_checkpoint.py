"""The checkpoint that the folder of a run means, wherever weights of a run are read: its best one
if the run ends with that, otherwise its latest valid one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from ..checkpoint.disk import trainer_state
from ..checkpoint.disk.commit import named
from ..checkpoint.verification import verify_weights
from ..errors import CheckpointError, RecipeError
from .files import RUN_RECIPE, read_text
from .yaml import parse

logger = logging.getLogger(__name__)
Damaged = Mapping[Path, str]  # checkpoint -> what is wrong with it
NONE_DAMAGED: Damaged = {}


def checkpoint_of(run: Path, damaged: Damaged = NONE_DAMAGED) -> Path:
    """The checkpoint of ``run`` that its weights are read from, none of those that are known to be
    ``damaged``. Damaged ones are logged. Raises ``CheckpointError`` if none is valid."""
    newest = _newest(run, damaged)
    name = best_of(newest)
    best = newest if name is None else newest.with_name(name)
    if not best.is_dir():
        return newest
    if best in damaged or not verify_weights(best).ok:
        logger.warning("the best checkpoint, %s, is damaged: using %s", best.name, newest.name)
        return newest
    return best


def best_of(checkpoint: Path) -> str | None:
    """The name of the best checkpoint so far, if the run of ``checkpoint`` ends with that one: by
    the recipe of its latest launch, or, where a checkpoint is without its run, by its own."""
    recipe = checkpoint.with_name(RUN_RECIPE)
    if not recipe.is_file():
        recipe = checkpoint / RUN_RECIPE
    try:
        train = parse(read_text(recipe, follow=False)).data["train"]  # type: ignore[index]
        step = trainer_state.read(trainer_state.load(checkpoint)).best_step
    except (RecipeError, CheckpointError, KeyError, TypeError):
        return None
    ends_with_best = isinstance(train, Mapping) and train.get("load_best_model_at_end") is True
    return f"checkpoint-{step}" if ends_with_best and step is not None else None


def _newest(run: Path, damaged: Damaged) -> Path:
    reasons = []
    for folder in reversed(named(run)):
        if folder in damaged:
            reasons.append(damaged[folder])
            continue
        report = verify_weights(folder)
        if report.ok:
            return folder
        reasons.append(report.problems[0])
        logger.warning("%s is skipped: %s", folder.name, report.problems[0])
    raise CheckpointError(f"{run}: none of its checkpoints is valid; the latest: {reasons[0]}")
