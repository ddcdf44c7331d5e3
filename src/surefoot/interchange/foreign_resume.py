"""Going on from a folder that another trainer wrote: whose it is, and who reads it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal

from ..checkpoint.weights import detect_layout
from ..errors import CheckpointError, RecipeError
from ..storage import files
from ..training.trainer import Trainer
from .from_mindspore import load_mindspore_checkpoint
from .from_trainer import check_trainer_checkpoint, load_trainer_checkpoint
from .trainer_folder import is_trainer_checkpoint

Writer = Literal["trainer", "mindspore"]


def detect_trainer(folder: Path, *, trust_pickle: bool, pp: int) -> Writer | None:
    """Which other trainer wrote ``folder``; None if a run of ours did.

    Args:
        folder: what ``checkpoint.resume`` names.
        trust_pickle: whether the user said that the pickles in it may be read.
        pp: stages of the run's pipeline.

    Raises:
        CheckpointError: what shows without a model: pickles that are not trusted, weights alone.
        RecipeError: a pipeline, which cannot go on from a Trainer's.
    """
    if is_trainer_checkpoint(folder):
        if pp > 1:
            raise RecipeError(
                f"parallel.pp: a pipeline cannot go on from {folder}, which another trainer wrote; "
                "start with pp 1, save, and go on from that with any pp"
            )
        check_trainer_checkpoint(folder, trust_pickle=trust_pickle)
        return "trainer"
    with files.raising(CheckpointError):
        layout = detect_layout(folder)
    if layout == "mindspore":
        return "mindspore"
    if layout in ("huggingface", "peft", "dcp"):
        where = "adapter" if layout == "peft" else "path"
        raise CheckpointError(
            f"{folder}: weights alone ({layout}), without the state of a training to go on from; "
            f"to start from them, leave checkpoint.resume out and set "
            f"model.{where}={shlex.quote(str(folder))}"
        )
    return None


def resume_from(
    folder: Path, writer: Writer, trainer: Trainer, *, base: Path, trust_pickle: bool
) -> None:
    """Make ``trainer`` what the other trainer's was; errors as of the two that do it."""
    if writer == "trainer":
        load_trainer_checkpoint(folder, trainer, trust_pickle=trust_pickle)
    else:
        load_mindspore_checkpoint(folder, trainer, base=base)
