"""What has changed since a run was saved, by what each setting says of that where it is declared
(docs/decisions/0099).

One comparison for the run's own folder, for a checkpoint that a run in a new folder resumes from,
and for one of another trainer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import schema
from ..checkpoint.disk.commit import step_of
from ..checkpoint.disk.retention import origin_of
from ..errors import RunError
from ..model.base_identity import is_new
from ..schema import MayChange
from ..schema.locations import DatasetReference, FunctionPath
from ..storage.files import is_one_place

logger = logging.getLogger(__name__)
_SHOWN = 4


@dataclass(frozen=True)
class RecipeChange:
    """A setting whose value has changed."""

    path: str
    old: object
    new: object
    may: MayChange | None = field(default=None, compare=False)  # what it means on a resume
    is_kept: bool = field(default=False, compare=False)  # whether none takes another one

    def __str__(self) -> str:
        return f"{self.path}: {self.old} -> {self.new}"


def changes(old: object, new: object) -> list[RecipeChange]:
    """The settings of two recipes, or sections, whose values differ, in their order."""
    return list(_changes(old, new, ()))


def _changes(
    old: object, new: object, path: schema.Keys, may: MayChange | None = None
) -> Iterator[RecipeChange]:
    cls: type = type(old)
    for name, setting in schema.settings(cls).items():
        before, after, here = getattr(old, name), getattr(new, name), (*path, name)
        means, kept = setting.may_change or may, setting.kept
        if setting.choices is not None:
            was, is_now = (schema.variant_name(setting.choices, each) for each in (before, after))
            if was != is_now:
                # Another optimizer's moments, another method's weights, another stage's rows.
                yield RecipeChange(schema.dotted(here), was, is_now, means, means is None)
                continue
            here = (*here, was)
        if schema.is_section(before):
            yield from _changes(before, after, here, means)
            continue
        if kept and kept.value:
            is_same = kept.value(old) == kept.value(new)
        else:
            is_same = _is_same(before, after)
        if not is_same:
            values = [schema.write_setting(setting, each) for each in (before, after)]
            if kept and kept.value and values[0] == values[1]:  # unset, and follows another one
                values = [kept.value(old), kept.value(new)]
            old_value, new_value = values
            place = schema.dotted(here)
            yield RecipeChange(place, old_value, new_value, means, kept is not None)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal, or two names of one file or folder: a home may be reached by a
    link, or be mounted twice."""
    if one == other or type(one) is not type(other):
        return bool(one == other)
    inside, beside = _parts(one), _parts(other)
    if inside is not None and beside is not None:
        return len(inside) == len(beside) and all(map(_is_same, inside, beside))
    if not isinstance(one, str | Path) or not Path(one).is_absolute():
        return False
    return is_one_place(Path(one), Path(other))


def _parts(value: Any) -> Sequence[Any] | None:
    """What a value consists of that may have a path in it; None of a plain one."""
    if isinstance(value, FunctionPath):
        return value.name, value.file
    if isinstance(value, DatasetReference):
        return str(value), value.source
    if isinstance(value, Mapping):
        return [part for key in sorted(value) for part in (key, value[key])]
    if schema.is_section(value):
        cls: type = type(value)
        return [getattr(value, name) for name in schema.settings(cls)]
    return value if isinstance(value, tuple) else None


def changes_in(folder: Path, before: object, now: object) -> list[RecipeChange]:
    """The changes of a run that continues in ``folder``: its new weights may have moved with it,
    and ``auto`` is the size of micro-batches, or the policy of recomputation, that it has
    chosen."""
    chosen = "train.micro_batch_size", "model.gradient_checkpointing"
    found = [change for change in changes(before, now) if not _has_moved(change, folder)]
    return [change for change in found if change.path not in chosen or change.new != "auto"]


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


def compare_with_checkpoint(
    checkpoint: Path, before: object, now: object, folder: Path, weights: str
) -> None:
    """Compare the recipe of ``checkpoint`` with that of the run in ``folder`` that resumes from it.
    Raises ``RunError``; ``weights`` is the setting that starts a new run from its weights."""
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


def _listed(found: Sequence[RecipeChange]) -> str:
    return "; ".join(map(str, found[:_SHOWN]))


def _back(found: Sequence[RecipeChange]) -> str:
    values = (c.old if isinstance(c.old, str) else json.dumps(c.old, default=str) for c in found)
    return "set " + ", ".join(f"{c.path} to {v}" for c, v in zip(found, values, strict=True))
