"""The training loop, and what stages, methods and callbacks owe it.

The names are imported when they are first asked for: a recipe is read without the loop, and torch.
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
