"""The training loop, and what stages, methods and callbacks owe it."""

from .callback import Context, TrainerCallback
from .state import TrainerControl, TrainerState
from .trainer import Trainer

__all__ = ["Context", "Trainer", "TrainerCallback", "TrainerControl", "TrainerState"]
