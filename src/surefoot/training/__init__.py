"""The training loop, and what a stage, a callback and a reward are to it.

Doors: ``stage`` (the protocol of an objective, and its context), ``trainer`` (the loop),
``windows`` (what each step trains on), ``step`` (one update), ``evaluation``, ``callback``,
``callbacks/`` and ``arguments``, ``rewards`` and ``rollout`` (of sampled responses), ``losses``
and ``policy_gradient`` (the mathematics, as pure functions), ``section`` (the recipe's ``train``).

A batch passes through: a window of encoded examples, with precomputed columns (``precompute``), is
prepared by the stage (``context``: outputs, samples, rewards), assigned to ranks and micro-batches,
and trained on in one or several steps, whose metrics callbacks see. The names below are imported on
first use: a recipe is read without the loop, and torch.
"""

from typing import TYPE_CHECKING

from ..extensions import lazy_getattr

if TYPE_CHECKING:
    from .arguments import Context
    from .callback import TrainerCallback, TrainerControl, TrainerState
    from .callbacks._progress import Screen
    from .trainer import Trainer

__all__ = ["Context", "Screen", "Trainer", "TrainerCallback", "TrainerControl", "TrainerState"]

_HOMES = {
    ".arguments": ("Context",),
    ".callback": ("TrainerCallback", "TrainerControl", "TrainerState"),
    ".callbacks._progress": ("Screen",),
    ".trainer": ("Trainer",),
}
__getattr__ = lazy_getattr(__name__, _HOMES)
