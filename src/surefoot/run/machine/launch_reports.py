"""Trackers and the webhook of one launch: started by rank 0, ended within a bound."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from ... import schema
from ...errors import RecipeError
from ...network.preflight import check_packages
from ...parallel.world import World
from ...recipe.recipe import Recipe
from ...training.callbacks.reports import Reports
from ...training.callbacks.trackers.launching import TrackerProcess, finish
from ...training.callbacks.trackers.redaction import redacted
from ...training.section import TrainSection

TENSORBOARD = "tensorboard"  # which writes files itself, so it is a callback
WEBHOOK = "webhook"


@dataclass
class Reporting:
    """What the launch tells others; ``end`` is how it has ended."""

    callbacks: list[Reports] = field(default_factory=list)
    end: Mapping[str, object] = field(default_factory=lambda: {"outcome": "failed"})


@contextmanager
def reporting(recipe: Recipe, world: World) -> Iterator[Reporting]:
    """Report the launch inside the block; nothing on other ranks. Raises ``RecipeError`` if a
    tracker or the webhook's URL is missing."""
    world.on_main(partial(check_reports, recipe.train))
    processes = _processes(recipe) if world.is_main else []
    found = Reporting([Reports(processes)] if processes else [])
    for one in processes:
        one.start()
    try:
        yield found
    finally:
        finish(processes, **{name: _safe(value) for name, value in found.end.items()})


def check_reports(section: TrainSection) -> None:
    """Raise ``RecipeError`` if a tracker is not installed, or the webhook has no URL."""
    for name in section.report_to:
        check_packages([name], f"train.report_to: {name}")
    if section.webhook is not None and not os.environ.get(section.webhook):
        raise RecipeError(
            f"train.webhook: the environment variable {section.webhook} is not set; set it to the "
            "URL of the webhook, or remove train.webhook"
        )


def _processes(recipe: Recipe) -> list[TrackerProcess]:
    section = recipe.train
    order: dict[str, object] = {
        "folder": str(section.folder.absolute()),
        "run_name": section.run_name or section.folder.absolute().name,
        "project": section.project,
        "is_offline": section.report_offline,
    }
    config = json.loads(redacted(json.dumps(schema.write(recipe), default=str)))
    found = [
        TrackerProcess(name, {**order, "config": config})
        for name in section.report_to
        if name != TENSORBOARD
    ]
    url = os.environ.get(section.webhook) if section.webhook else None
    if url:
        variables = {"_SUREFOOT_WEBHOOK_URL": url}
        found.append(TrackerProcess(WEBHOOK, {**order, "is_eager": True}, variables))
    return found


def _safe(value: object) -> object:
    """Errors may name what they were given."""
    return redacted(value) if isinstance(value, str) else value
