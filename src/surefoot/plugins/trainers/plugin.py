"""What Surefoot knows of the Hugging Face Trainer, of PyTorch's DCP and of DeepSpeed, by name."""

from ...extensions import Plugin

_HERE = __package__

PLUGIN = Plugin(
    name="trainers",
    trainers={"trainer": f"{_HERE}.from_trainer:TRAINER"},
    targets={"trainer": f"{_HERE}.to_trainer:TrainerCheckpoint"},
    pickled={"trainers": f"{_HERE}.pickled_weights:open_weights"},
)
