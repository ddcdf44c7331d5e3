"""``reduce_lr_on_plateau``: a learning rate that falls when a metric of evaluations no longer
improves. Its factor depends on the evaluations so far, so it is part of the state of a run.

The rule is that of ``torch.optim.lr_scheduler.ReduceLROnPlateau``, which the Hugging Face Trainer
steps at each evaluation, too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal

from ..errors import counted
from ..schema import must

logger = logging.getLogger(__name__)
_NEGLIGIBLE = 1e-8  # torch's eps: a learning rate that would fall by no more stays as it is


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """When ``schedule: reduce_lr_on_plateau`` reduces the learning rate, and by how much. The
    defaults are those of ``torch.optim.lr_scheduler.ReduceLROnPlateau``."""

    factor: float = 0.1
    """The learning rate is multiplied by this; never below ``min_lr_ratio`` times the peak."""
    patience: int = 10
    """Evaluations in a row without improvement that are tolerated: the next one reduces."""
    threshold: float = 1e-4
    """By how much a metric must be better than the best one to be an improvement."""
    threshold_mode: Literal["rel", "abs"] = "rel"
    """``rel``: ``threshold`` is a share of the best metric; ``abs``: it is a difference."""
    cooldown: int = 0
    """Evaluations after a reduction that are not counted."""

    def __post_init__(self) -> None:
        if not 0 < self.factor < 1:
            raise ValueError(f"factor must be between 0 and 1, got {self.factor}")
        must(self, "not be negative", "patience", "threshold", "cooldown")

    def is_better(self, metric: float, best: float | None, *, greater: bool) -> bool:
        """Whether ``metric`` is an improvement; NaN never is."""
        if best is None:
            best = -math.inf if greater else math.inf
        sign = 1 if greater else -1
        if self.threshold_mode == "rel":
            bound = best * (1 + sign * self.threshold)
        else:
            bound = best + sign * self.threshold
        return metric > bound if greater else metric < bound


@dataclass
class Reductions:
    """The state of a schedule between evaluations, saved in every checkpoint."""

    factor: float = 1.0  # of the peak learning rate
    metric: str | None = None  # its name; ``best`` and ``num_bad`` are of it
    best: float | None = None
    num_bad: int = 0  # evaluations in a row without improvement
    cooldown: int = 0  # evaluations that are still not counted

    def add(
        self, rule: Plateau, name: str, metric: float, *, greater: bool, peak: float, lowest: float
    ) -> None:
        """Take in one evaluation. ``peak`` is a learning rate, ``lowest`` a share of it."""
        if self.metric != name:  # a resume may measure by another one
            self.metric, self.best, self.num_bad = name, None, 0
        if rule.is_better(metric, self.best, greater=greater):
            self.best, self.num_bad = metric, 0
        else:
            self.num_bad += 1
        if self.cooldown > 0:
            self.cooldown -= 1
            self.num_bad = 0
        if self.num_bad <= rule.patience:
            return
        self.cooldown, self.num_bad = rule.cooldown, 0
        reduced = max(self.factor * rule.factor, lowest)
        if (self.factor - reduced) * peak > _NEGLIGIBLE:
            self.factor = reduced
            logger.info(
                "learning rate reduced to %.4g: %s was no better than %s for %s",
                peak * reduced,
                name,
                "none" if self.best is None else f"{self.best:.4g}",
                counted(rule.patience + 1, "evaluation"),
            )

    def state_dict(self) -> dict[str, object]:
        """All fields as plain data."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore ``state``. A run that had no such schedule starts with none of it."""
        fresh = Reductions()
        for attribute in fields(self):
            name = attribute.name
            setattr(self, name, state.get(name, getattr(fresh, name)))
