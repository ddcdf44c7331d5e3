"""The training loop, and the protocols of stages, methods and callbacks.

The names are imported on first use: a recipe is read without the loop, and torch.
"""

from typing import TYPE_CHECKING

from ..lazy_exports import lazy_getattr

if TYPE_CHECKING:
    from .callback import Context, TrainerCallback
    from .state import TrainerControl, TrainerState
    from .trainer import Trainer

__all__ = ["Context", "Trainer", "TrainerCallback", "TrainerControl", "TrainerState"]

_HOMES = {
    ".callback": ("Context", "TrainerCallback"),
    ".state": ("TrainerControl", "TrainerState"),
    ".trainer": ("Trainer",),
}
__getattr__ = lazy_getattr(__name__, _HOMES)
