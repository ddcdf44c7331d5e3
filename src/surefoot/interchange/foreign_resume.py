"""Resume from another trainer's checkpoint: detect the trainer that wrote it and call its
loader.
"""

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
    """The other trainer that wrote ``folder``; None if Surefoot did.

    Args:
        folder: what ``checkpoint.resume`` names.
        trust_pickle: whether the user allows its pickles to be read.
        pp: number of pipeline stages of the run.

    Raises:
        CheckpointError: problems that show without a model: pickles that are not trusted, only
            weights.
        RecipeError: a pipeline, which cannot resume from a Trainer's checkpoint.
    """
    if is_trainer_checkpoint(folder):
        if pp > 1:
            raise RecipeError(
                f"parallel.pp: a pipeline cannot resume from {folder}, which another trainer "
                "wrote; start with pp 1, save, and resume from that checkpoint with any pp"
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
            f"{folder}: only weights ({layout}), without training state, so it cannot be "
            "resumed; to start from them, remove checkpoint.resume and set "
            f"model.{where}={shlex.quote(str(folder))}"
        )
    return None


def resume_from(
    folder: Path, writer: Writer, trainer: Trainer, *, base: Path, trust_pickle: bool
) -> None:
    """Load the other trainer's state into ``trainer``; errors as of the two loaders."""
    if writer == "trainer":
        load_trainer_checkpoint(folder, trainer, trust_pickle=trust_pickle)
    else:
        load_mindspore_checkpoint(folder, trainer, base=base)
