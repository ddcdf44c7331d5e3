"""Surefoot checkpoints in other training loops: Hugging Face's Trainer."""

from .trainer_checkpoints import SurefootCheckpoints

__all__ = ["SurefootCheckpoints"]
