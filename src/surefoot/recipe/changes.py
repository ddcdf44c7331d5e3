"""What has changed since a run was saved, by what each setting says of that where it is declared
(docs/decisions/0099).

One comparison for the run's own folder, for a checkpoint that a run in a new folder resumes from,
and for one of another trainer. And the recipe of a launch, and of a run that continues another one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import schema
from ..checkpoint.disk.commit import step_of
from ..checkpoint.disk.retention import origin_of
from ..checkpoint.section import CheckpointSection
from ..errors import RecipeError, RunError
from ..model.base_identity import is_new
from ..parallel.section import ParallelSection
from ..stages import STAGES
from .files import RUN_RECIPE
from .recipe import Recipe, RecipeChange, changes, dump, load, read

logger = logging.getLogger(__name__)
_SHOWN = 4


def changes_in(folder: Path, before: Recipe, now: Recipe) -> list[RecipeChange]:
    """The changes of a run that continues in ``folder``: its new weights may have moved with it,
    and ``auto`` is the size of micro-batches that it has chosen."""
    found = [change for change in changes(before, now) if not _has_moved(change, folder)]
    is_chosen = now.train.micro_batch_size == "auto"
    return [c for c in found if not (is_chosen and c.path == "train.micro_batch_size")]


def _has_moved(change: RecipeChange, folder: Path) -> bool:
    """Whether the model is new weights in the run's folder, which was elsewhere when they were
    made: equal names are equal contents."""
    if change.path != "model.path":
        return False
    old, new = Path(str(change.old)), Path(str(change.new))
    return (old.name, new.parent) == (new.name, folder.absolute()) and is_new(new)


def refuse_in_own(found: Sequence[RecipeChange], place: str) -> None:
    """Raise ``RunError`` if a setting has changed that belongs to the run in ``place``."""
    if not (differing := [change for change in found if change.may is None]):
        return
    cure = "resume from one of its checkpoints with checkpoint.resume=PATH in a new folder"
    if kept := [change for change in differing if change.is_kept]:
        cure = f"{_back(kept)} (no checkpoint of it can be resumed with another one)"
    raise RunError(
        f"train.output_dir: {place} contains a run with other settings ({_listed(differing)}). "
        f"Choose another folder, or {cure}"
    )


def say(found: Sequence[RecipeChange], since: str) -> None:
    """Log what a change means that a resume takes."""
    for change in found:
        means = "taken from here on" if change.may is None else change.may.means
        if means:
            logger.info("%s since %s: %s", change, since, means)


def compare_with_checkpoint(checkpoint: Path, before: Recipe, now: Recipe, weights: str) -> None:
    """Compare the recipe of ``checkpoint`` with that of the run that resumes from it. Raises
    ``RunError``; ``weights`` is the setting that starts a new run from its weights."""
    folder = now.train.folder
    found = changes_in(folder, before, now)
    origin = origin_of(folder)  # whose step is of another run, with that one's recipe
    is_origin = origin is not None and step_of(checkpoint) == origin[1]
    if checkpoint.resolve().parent == folder.resolve() and not is_origin:
        refuse_in_own(found, f"{checkpoint} in {folder}")
        return  # what may change was said when the folder was opened
    if kept := [change for change in found if change.is_kept]:
        raise RunError(
            f"checkpoint.resume: {checkpoint} was trained with other settings ({_listed(kept)}), "
            "by which its weights or the state of its optimizer mean what they do; "
            f"{_back(kept)}, or start a new run from its weights: remove checkpoint.resume, and "
            f"set {weights}={checkpoint}"
        )
    say(found, checkpoint.name)


def recipe_of(checkpoint: Path) -> Recipe | None:
    """The recipe in a checkpoint of Surefoot; None if it has none, as one that another loop saved,
    or one that this version cannot read."""
    if not (checkpoint / RUN_RECIPE).is_file():
        return None
    try:
        return load(checkpoint)
    except RecipeError as error:
        reason = str(error).partition("\n")[0]
        logger.warning("%s: its settings are not compared: %s", checkpoint.name, reason)
        return None


def _listed(found: Sequence[RecipeChange]) -> str:
    return "; ".join(map(str, found[:_SHOWN]))


def _back(found: Sequence[RecipeChange]) -> str:
    values = (c.old if isinstance(c.old, str) else json.dumps(c.old, default=str) for c in found)
    return "set " + ", ".join(f"{c.path} to {v}" for c, v in zip(found, values, strict=True))


@dataclass(frozen=True)
class LaunchRecipe:
    """The recipe of a run as one of its launches had it, for steps that are computed again."""

    recipe: Recipe

    @classmethod
    def of(
        cls, run: Path, settings: Mapping[str, Any], ranks: int | None, folder: Path
    ) -> LaunchRecipe:
        """That of ``run`` with the ``settings`` of the launch and on its ``ranks``, if these are
        known, which works in ``folder``. Raises ``RecipeError``, and ``RunError`` if its steps
        cannot be repeated."""
        known = {} if ranks is None else {"parallel.num_processes": ranks}
        recipe = read(load(run), {**settings, **known})
        if recipe.stage.sampler.server is not None:
            raise RunError(
                f"stage.{schema.variant_name(STAGES, recipe.stage)}.sampler: a server has sampled "
                "the responses of this run, and samples other ones each time, so its steps cannot "
                "be computed again"
            )
        train = replace(recipe.train, output_dir=folder)
        layout = recipe.checkpoint.layout_in(recipe.train.output_dir)
        # All that is saved stays, and nothing is a link to a file of the run, which is only read.
        saves = CheckpointSection(keep=None, share_unchanged=False, layout=layout)
        saves = replace(saves, max_shard_size=recipe.checkpoint.max_shard_size)
        return cls(replace(recipe, train=train, checkpoint=saves))

    @property
    def parallel(self) -> ParallelSection:
        """The mesh of its ranks."""
        return self.recipe.parallel

    @property
    def follows_evaluations(self) -> bool:
        """Whether weights depend on evaluations: these are repeated, too."""
        return self.recipe.optim.follows_evaluations


@dataclass(frozen=True)
class ForkRecipe:
    """The recipe of a run that continues another one."""

    before: bytes  # that of the other run
    text: bytes
    changes: list[str]

    @classmethod
    def of(cls, run: Path, step: int, new: Path, overrides: Sequence[str]) -> ForkRecipe:
        """That of the run in ``new``, which continues ``run`` after ``step`` with ``overrides``.
        Raises ``RecipeError``, and ``RunError`` for a setting by which its state means something.
        """
        before, now = (_placed(load(run, given), new) for given in ((), overrides))
        weights = "model.path" if now.method.saves_base_model else "model.adapter"
        compare_with_checkpoint(run / f"checkpoint-{step}", before, now, weights)
        found = [str(change) for change in changes(before, now)]
        return cls(dump(before).encode(), dump(now).encode(), found)


def _placed(recipe: Recipe, folder: Path) -> Recipe:
    """``recipe`` of a run in ``folder``, which resumes from the latest of its checkpoints."""
    train = replace(recipe.train, output_dir=folder)
    saves = replace(recipe.checkpoint, resume="auto")
    return replace(recipe, train=train, checkpoint=saves)
