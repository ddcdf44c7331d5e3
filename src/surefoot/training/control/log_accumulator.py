"""The metrics between two logs; their sums are in TrainerState, so that a resume keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..callback import Callbacks
from ..state import TrainerState
from ..step import StepMetrics


@dataclass
class LogAccumulator:
    """Accumulates steps and converts them to one record."""

    state: TrainerState
    num_parameters: int  # for the estimate of total_flos
    seconds: float = 0.0  # speed is of this session only, so these two are not saved
    tokens: int = 0
    last: StepMetrics | None = None

    def spend(self, seconds: float) -> None:
        """Add training time."""
        self.seconds += seconds
        self.state.train_runtime += seconds

    def add(self, figures: StepMetrics) -> None:
        """Add one step."""
        state, tokens = self.state, figures.num_tokens
        self.tokens, self.last = self.tokens + tokens, figures
        state.num_input_tokens_seen += tokens
        state.total_flos += 6.0 * self.num_parameters * tokens
        if not figures.is_finite:
            return
        state.train_loss_total += figures.loss / figures.weight if figures.weight else 0.0
        state.interval_loss += figures.loss
        state.interval_weight += figures.weight
        for name, value in figures.metrics.items():
            state.interval_metrics[name] = state.interval_metrics.get(name, 0.0) + value

    def note(self, figures: Mapping[str, float]) -> None:
        """Add the metrics of a window, if there are any."""
        state = self.state
        state.interval_windows += bool(figures)
        for name, value in figures.items():
            state.interval_figures[name] = state.interval_figures.get(name, 0.0) + value

    def log(self, callbacks: Callbacks) -> None:
        """Report the steps since the last report, if there are any, and reset."""
        state = self.state
        if self.last is None:
            return
        weight, windows = state.interval_weight, state.interval_windows
        record: dict[str, float] = {
            "step": state.global_step,
            "epoch": state.epoch,
            "loss": state.interval_loss / weight if weight else float("nan"),
            "grad_norm": self.last.grad_norm,
            "learning_rate": self.last.learning_rate,
            **{name: value / weight for name, value in state.interval_metrics.items() if weight},
            **{name: value / windows for name, value in state.interval_figures.items()},
            "num_input_tokens_seen": state.num_input_tokens_seen,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
        }
        state.log_history.append(record)
        state.interval_loss = state.interval_weight = 0.0
        state.interval_metrics, state.interval_figures, state.interval_windows = {}, {}, 0
        self.seconds, self.tokens, self.last = 0.0, 0, None
        callbacks.emit("on_log", logs=record)
