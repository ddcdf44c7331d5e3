"""Our checkpoints in the loops of others: Hugging Face's Trainer."""

from .trainer_checkpoints import SurefootCheckpoints

__all__ = ["SurefootCheckpoints"]
