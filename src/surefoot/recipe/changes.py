"""What has changed since a run was saved, by what each setting says of that where it is declared
(docs/decisions/0099).

One comparison for the run's own folder, for a checkpoint that a run in a new folder resumes from,
and for one of another trainer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from ..checkpoint.disk.commit import step_of
from ..checkpoint.disk.retention import origin_of
from ..errors import RecipeError, RunError
from ..model.base_identity import is_new
from .files import RUN_RECIPE
from .recipe import Recipe, RecipeChange, changes, load

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
