"""The retention policy in the recipe of a run's folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import schema
from ..checkpoint.disk.retention import RetentionPolicy, more_is_better
from ..checkpoint.looking.listing import PruneOptions
from ..checkpoint.section import CheckpointSection
from ..errors import CheckpointError
from .files import RUN_RECIPE, read_text
from .yaml import parse

_METRIC = "eval_loss"


def prune_options(folder: Path, options: Mapping[str, Any]) -> PruneOptions:
    """The retention policy of the recipe in a run's folder; ``options`` replace its settings of
    these names.

    Raises:
        CheckpointError: there is no recipe, and no option sets a policy.
        RecipeError: the recipe cannot be read.
    """
    numbers = {field.name for field in dataclasses.fields(RetentionPolicy)}
    section, train = CheckpointSection(keep=None), dict[str, Any]()
    if (folder / RUN_RECIPE).exists():
        section, train = _recipe(folder / RUN_RECIPE)
    elif not options.keys() & numbers:
        raise CheckpointError(
            f"{folder}: no {RUN_RECIPE}, so no retention policy; give one, for example --keep 3"
        )
    chosen = {name: value for name, value in options.items() if name in numbers}
    metric = options.get("metric") or train.get("metric_for_best_model") or _METRIC
    greater = options.get("greater")
    if greater is None and "metric" not in options:
        greater = train.get("greater_is_better")
    return PruneOptions(
        dataclasses.replace(section.rule(), **chosen),
        str(metric),
        more_is_better(str(metric)) if greater is None else bool(greater),
        section.resume,
    )


def _recipe(path: Path) -> tuple[CheckpointSection, dict[str, Any]]:
    """Two of its sections; the others may be of another version."""
    document = parse(read_text(path, follow=False), str(path))
    sections = document.data if isinstance(document.data, dict) else {}

    def wrong(problems: Sequence[schema.Problem]) -> Exception:
        inside = [schema.Problem(("checkpoint", *p.path), p.message) for p in problems]
        return document.error(inside)

    section = schema.read(CheckpointSection, sections.get("checkpoint"), fail=wrong)
    train = sections.get("train")
    return section, train if isinstance(train, dict) else {}
