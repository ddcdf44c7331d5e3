"""Record an evaluation: the log, and the best step so far."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...errors import RunError
from ..callback import Callbacks
from ..section import TrainSection


def record_evaluation(
    section: TrainSection, callbacks: Callbacks, metrics: Mapping[str, float]
) -> None:
    """Log ``metrics``, update the best step, call the callbacks. With ``load_best_model_at_end`` a
    new best is always saved. Raises ``RunError`` if ``metric_for_best_model`` is not among them."""
    state, control = callbacks.state, callbacks.control
    record = {"step": state.global_step, "epoch": state.epoch, **metrics}
    state.log_history.append(record)
    callbacks.emit("on_log", logs=record)
    name = section.metric_for_best_model
    if name not in metrics:
        raise RunError(
            f"train.metric_for_best_model: no metric {name!r}; "
            f"expected one of {', '.join(sorted(metrics))}"
        )
    if is_better(metrics[name], state.best_metric, greater=section.is_greater_better):
        state.best_metric, state.best_global_step = metrics[name], state.global_step
        control.should_save |= section.load_best_model_at_end
    callbacks.emit("on_evaluate", metrics=metrics)


def is_better(new: float, old: float | None, *, greater: bool, by: float = 0.0) -> bool:
    """Whether ``new`` beats ``old`` by more than ``by``; nan never does, anything beats None."""
    if math.isnan(new):
        return False
    if old is None:
        return True
    return new > old + by if greater else new < old - by
