"""Optimizers and learning-rate schedules. To add an optimizer: write its file, add its line."""

from .adamw import AdamW

OPTIMIZERS = {"adamw": AdamW}
