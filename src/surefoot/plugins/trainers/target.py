"""A checkpoint that the Hugging Face Trainer resumes from, as a target of conversions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...checkpoint.converting.origin import Done, Origin, Target
from ...checkpoint.disk.folder import open_checkpoint
from ...checkpoint.sources.copying import Progress
from ...errors import CheckpointError
from ...recipe.files import RUN_RECIPE
from ...recipe.recipe import load
from .to_trainer import save_trainer_checkpoint


@dataclass(frozen=True)
class TrainerCheckpoint(Target):
    """A checkpoint that ``Trainer.train(resume_from_checkpoint=DST)`` resumes from."""

    base: str | None = None
    """The base model of an adapter if it moved, or of foreign weights (DCP, DeepSpeed)."""

    def write(self, origin: Origin, target: Path, progress: Progress) -> Done:
        """Weights, moments, schedule, generators and log of a Surefoot checkpoint."""
        open_checkpoint(origin.folder)  # ours; nobody else's holds what it takes
        base = origin.adapter_base()
        if not (origin.folder / RUN_RECIPE).is_file():
            raise CheckpointError(
                f"{origin.folder}: it has no {RUN_RECIPE}, which contains the settings "
                "of its optimizer"
            )
        recipe = load(origin.folder / RUN_RECIPE)
        arguments = save_trainer_checkpoint(origin.folder, target, run=recipe, base=base)
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        words = f"resume with TrainingArguments(output_dir=..., {given})\n"
        words += f"and trainer.train(resume_from_checkpoint={str(target)!r})"
        return Done({"training_arguments": arguments}, words)
