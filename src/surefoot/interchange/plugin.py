"""What Surefoot knows of the Hugging Face Trainer, by name."""

from ..extensions import Plugin

PLUGIN = Plugin(
    name="trainer",
    trainers={"trainer": f"{__package__}.foreign_resume:TRAINER"},
    targets={"trainer": "surefoot.use.exporting.trainer_target:TrainerCheckpoint"},
)
