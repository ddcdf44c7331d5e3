"""Resume from another trainer's checkpoint: detect the trainer that wrote it, call its loader."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from ..checkpoint.layouts.detection import detect_layout
from ..errors import CheckpointError, RecipeError
from ..extensions import Extended
from ..storage import files
from ..training.trainer import Trainer
from .from_trainer import check_trainer_checkpoint, load_trainer_checkpoint
from .trainer_folder import is_trainer_checkpoint


class ForeignTrainer(Protocol):
    """Another trainer, from whose checkpoints a run can resume."""

    needs_base: ClassVar[bool]
    """Whether the weights of the base must be loaded before its checkpoint is."""

    def recognise(self, folder: Path) -> bool:
        """Whether it wrote ``folder``. From names alone."""

    def check(self, folder: Path, *, trust_pickle: bool, pp: int) -> None:
        """Refuse what shows without a model."""

    def load(self, folder: Path, trainer: Trainer, *, base: Path, trust_pickle: bool) -> None:
        """Make ``trainer`` what the other trainer was."""


@dataclass(frozen=True)
class HuggingFaceTrainer:
    """The Trainer of transformers."""

    needs_base: ClassVar[bool] = True

    def recognise(self, folder: Path) -> bool:
        """Whether it wrote ``folder``, complete or not."""
        return is_trainer_checkpoint(folder)

    def check(self, folder: Path, *, trust_pickle: bool, pp: int) -> None:
        """Raises ``RecipeError`` for a pipeline, ``CheckpointError`` for pickles not trusted."""
        if pp > 1:
            raise RecipeError(
                f"parallel.pp: a pipeline cannot resume from {folder}, which another trainer "
                "wrote; start with pp 1, save, and resume from that checkpoint with any pp"
            )
        check_trainer_checkpoint(folder, trust_pickle=trust_pickle)

    def load(self, folder: Path, trainer: Trainer, *, base: Path, trust_pickle: bool) -> None:
        """The model around an adapter is not needed."""
        load_trainer_checkpoint(folder, trainer, trust_pickle=trust_pickle)


TRAINER = HuggingFaceTrainer()
TRAINERS: Mapping[str, ForeignTrainer] = Extended("trainers", {})


def detect_trainer(folder: Path, *, trust_pickle: bool, pp: int) -> ForeignTrainer | None:
    """The other trainer that wrote ``folder``; None if Surefoot did.

    Raises for what shows without a model: ``CheckpointError`` for pickles that are not trusted, or
    mere weights, ``RecipeError`` for a pipeline, which cannot resume from a Trainer's checkpoint.
    """
    with files.raising(CheckpointError):
        found = next((one for one in TRAINERS.values() if one.recognise(folder)), None)
        layout = None if found is not None else detect_layout(folder)
    if found is not None:
        found.check(folder, trust_pickle=trust_pickle, pp=pp)
        return found
    if layout is not None and not layout.has_manifest:
        where = "adapter" if layout.is_adapter else "path"
        raise CheckpointError(
            f"{folder}: only weights ({layout.name}), without training state, so it cannot be "
            "resumed; to start from them, remove checkpoint.resume and set "
            f"model.{where}={shlex.quote(str(folder))}"
        )
    return None
