"""Early stopping; its patience survives a resume."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import counted
from ..callback import Context, Metrics, TrainerCallback
from ..evaluation import is_better
from ..state import TrainerControl, TrainerState

logger = logging.getLogger(__name__)


@dataclass
class EarlyStop(TrainerCallback):
    """Stops after ``patience`` evaluations in a row, none better by more than ``threshold``."""

    patience: int
    threshold: float = 0.0
    best: float | None = None
    num_worse: int = 0

    def on_train_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """A run that had stopped already does not resume."""
        if self.num_worse >= self.patience:
            control.should_training_stop = True
            logger.info(
                "this run has stopped early, at step %d; to train longer, raise "
                "train.early_stopping_patience",
                state.global_step,
            )

    def on_evaluate(
        self, args: Context, state: TrainerState, control: TrainerControl, metrics: Metrics
    ) -> None:
        """Count evaluations without a better metric."""
        section = args.section
        metric = metrics[section.metric_for_best_model]
        if is_better(metric, self.best, greater=section.is_greater_better, by=self.threshold):
            self.best, self.num_worse = metric, 0
            return
        self.num_worse += 1
        if self.num_worse >= self.patience:
            control.should_training_stop = control.should_save = True
            logger.info(
                "early stop at step %d: %s was no better than %.4g for %s",
                state.global_step,
                section.metric_for_best_model,
                self.best,
                counted(self.num_worse, "evaluation"),
            )

    def state_dict(self) -> dict[str, float | None]:
        """Best metric, and the number of evaluations that were not better."""
        return {"best": self.best, "num_worse": self.num_worse}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Restore the count."""
        self.best, self.num_worse = state["best"], int(state["num_worse"] or 0)
