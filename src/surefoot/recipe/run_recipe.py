"""What the recipe in a run's folder decides: which checkpoint the run means, and which are kept."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import schema
from ..checkpoint.disk.commit import named
from ..checkpoint.disk.folder import TrainerStateFile, load_trainer_state
from ..checkpoint.disk.retention import RetentionPolicy
from ..checkpoint.looking.listing import PruneOptions
from ..checkpoint.section import CheckpointSection
from ..checkpoint.verification import verify_weights
from ..errors import CheckpointError, RecipeError
from ..schema.locations import DatasetReference
from ..stages import STAGES
from ..training.stage import Stage, is_greater_better
from .files import RUN_RECIPE, read_text
from .yaml import parse

logger = logging.getLogger(__name__)
Damaged = Mapping[Path, str]  # checkpoint -> what is wrong with it
NONE_DAMAGED: Damaged = {}


def checkpoint_of(run: Path, damaged: Damaged = NONE_DAMAGED) -> Path:
    """The checkpoint of ``run`` that its weights are read from, none of those that are known to be
    ``damaged``: its best one if the run ends with that, otherwise its latest valid one. Damaged
    ones are logged. Raises ``CheckpointError`` if none is valid."""
    newest = _newest(run, damaged)
    # By the latest one: only its log knows all evaluations.
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
        # No link: in a stranger's run it would show another file of this machine.
        train = parse(read_text(recipe, follow=False)).data["train"]  # type: ignore[index]
        step = TrainerStateFile.of(load_trainer_state(checkpoint)).best_step
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


_METRIC = "eval_loss"


def prune_options(folder: Path, options: Mapping[str, Any]) -> PruneOptions:
    """The retention policy of the recipe in a run's folder; ``options`` replace its settings of
    these names.

    Raises:
        CheckpointError: there is no recipe, and no option sets a policy.
        RecipeError: the recipe cannot be read.
    """
    numbers = {field.name for field in dataclasses.fields(RetentionPolicy)}
    section, sections = CheckpointSection(keep=None), dict[str, Any]()
    if (folder / RUN_RECIPE).exists():
        section, sections = _recipe(folder / RUN_RECIPE)
    elif not options.keys() & numbers:
        raise CheckpointError(
            f"{folder}: no {RUN_RECIPE}, so no retention policy; give one, for example --keep 3"
        )
    chosen = {name: value for name, value in options.items() if name in numbers}
    train = sections["train"] if isinstance(sections.get("train"), dict) else {}
    metric = options.get("metric") or train.get("metric_for_best_model") or _METRIC
    greater = options.get("greater")
    if greater is None and "metric" not in options:
        greater = train.get("greater_is_better")
    if greater is None:
        greater = _is_greater_better(str(metric), sections)
    return PruneOptions(
        dataclasses.replace(section.rule(), **chosen),
        str(metric),
        greater,
        section.resume,
    )


def _is_greater_better(metric: str, sections: Mapping[str, Any]) -> bool | None:
    """The same as ``greater_is_better`` of a recipe that another version may have written."""
    stage, data = sections.get("stage"), sections.get("data")
    name = next(iter(stage), None) if isinstance(stage, dict) else stage
    cls = STAGES[name] if isinstance(name, str) and name in STAGES else Stage
    given = data.get("eval_datasets") if isinstance(data, dict) else None
    names = [str(DatasetReference.of(each)) for each in given] if isinstance(given, list) else []
    return is_greater_better(cls, metric, names)


def _recipe(path: Path) -> tuple[CheckpointSection, dict[str, Any]]:
    """Its section of checkpoints, and all as plain data: others may be of another version."""
    document = parse(read_text(path, follow=False), str(path))
    sections = document.data if isinstance(document.data, dict) else {}

    def wrong(problems: Sequence[schema.Problem]) -> Exception:
        inside = [schema.Problem(("checkpoint", *p.path), p.message) for p in problems]
        return document.error(inside)

    section = schema.read(CheckpointSection, sections.get("checkpoint"), fail=wrong)
    return section, sections
