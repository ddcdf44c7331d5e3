"""The folder of a run: one run, one process at a time, and where it goes on from."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .checkpoint.commit import being_written, clean, committed, set_aside, step_of
from .checkpoint.verify import find
from .errors import CheckpointError, RunError
from .files import raising, write_aside
from .recipe.recipe import Recipe, changes, dump, load

logger = logging.getLogger(__name__)
RECIPE = "recipe.yaml"
_PAUSE = 0.1  # seconds between two looks
# What may differ between two starts of one run: how long, what to report, keep and survive.
FREE: tuple[str, ...] = (
    "checkpoint",
    "generate",
    "model.attention",
    "model.gradient_checkpointing",
)
FREE += ("train.output_dir", "train.num_epochs", "train.max_steps", "train.micro_batch_size")
FREE += ("train.on_nan", "train.report_to", "train.deterministic", "train.load_best_model_at_end")
FREE += ("train.log_", "train.eval_", "train.early_", "train.metric_", "train.greater_")
FREE += ("data.cache_dir", "data.max_broken_rows", "data.packing")


@contextmanager
def opened(recipe: Recipe) -> Iterator[Path]:
    """The run's folder, made if need be, locked against a second process for as long as the block
    lasts.

    Raises:
        RunError: it cannot be written, another process trains in it, or it holds another run.
    """
    folder = recipe.train.output_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise RunError(
            f"train.output_dir: cannot write in {folder}: {error.strerror}; choose another folder"
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a dead process holds no lock
        except BlockingIOError:
            raise RunError(
                f"train.output_dir: another process is training in {folder}; "
                "stop it or choose another folder"
            ) from None
        _wait_for_orphans(folder)
        _refuse_another_run(folder, recipe)
        yield folder
    finally:
        os.close(descriptor)


def _wait_for_orphans(folder: Path) -> None:
    """Wait for a save that outlived its run: the run goes on from there, not from the one before.

    Nobody trains here, so what is still being written is the last snapshot of a run that died.
    """
    is_told = False
    while writing := being_written(folder):
        if not is_told:
            logger.info(
                "a run died here; waiting for its last save, %s, to finish", writing[0].name
            )
            is_told = True
        time.sleep(_PAUSE)


def _refuse_another_run(folder: Path, recipe: Recipe) -> None:
    known = folder / RECIPE
    if not known.exists():
        if strangers := committed(folder):
            raise RunError(
                f"train.output_dir: {folder} holds {strangers[-1].name} of a run without {RECIPE}, "
                "so it is not one of ours; choose another folder"
            )
        return
    differing = [c for c in changes(load(known), recipe) if not c.path.startswith(FREE)]
    asked = Path(recipe.checkpoint.resume).resolve().parent == folder.resolve()
    if differing and committed(folder) and not asked:
        listed = "; ".join(str(change) for change in differing[:4])
        raise RunError(
            f"train.output_dir: {folder} holds another run ({listed}). Choose another folder, "
            "or go on from one of its checkpoints with checkpoint.resume=PATH in a new folder"
        )


def write_recipe(folder: Path, recipe: Recipe) -> None:
    """Leave the resolved recipe in the run's folder."""
    with raising(RunError, "recipe"):
        write_aside(folder / RECIPE, dump(recipe).encode())


def resume_point(folder: Path, resume: str) -> Path | None:
    """The checkpoint to go on from, or None to start anew.

    Checkpoints that do not verify are named, kept under another name, and passed over.

    Raises:
        RunError: ``none`` was asked for, but the folder holds checkpoints.
        CheckpointError: the checkpoint asked for is missing or damaged.
    """
    for leftover in clean(folder):
        logger.info("removed %s, left by a save that was cut short", leftover.name)
    if resume == "none":
        if there := committed(folder):
            raise RunError(
                f"checkpoint.resume is none, but {folder} holds {there[-1].name}; "
                "choose another train.output_dir"
            )
        return None
    if resume == "auto" or (
        committed(folder) and Path(resume).resolve().parent != folder.resolve()
    ):
        return _newest_sound(folder)
    return _asked_for(folder, Path(resume))


def _newest_sound(folder: Path) -> Path | None:
    found = find(folder)
    for path, reason in found.passed_over:
        aside = set_aside(path)
        logger.warning("%s does not verify (%s); kept as %s", path.name, reason, aside.name)
    if found.passed_over and found.path is None:
        logger.warning("no sound checkpoint in %s: starting anew", folder)
    return found.path


def _asked_for(folder: Path, path: Path) -> Path:
    if not path.is_dir():
        raise CheckpointError(f"checkpoint.resume: no checkpoint folder {path}")
    later = [p for p in committed(folder) if step_of(p) > step_of(path)]
    if path.resolve().parent == folder.resolve() and later:
        raise RunError(
            f"checkpoint.resume: {folder} holds later checkpoints than {path.name} (up to "
            f"{later[-1].name}), which training would run into; choose another train.output_dir"
        )
    return path
