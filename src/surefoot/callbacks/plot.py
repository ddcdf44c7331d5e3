"""``loss.png``: training and evaluation loss over the steps, redrawn at saves and at the end."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..storage.files import explain, write_aside
from ..training.callback import Context, TrainerCallback
from ..training.state import TrainerControl, TrainerState

logger = logging.getLogger(__name__)
NAME = "loss.png"
SMOOTHING = 0.9  # of the exponential mean drawn over the raw curve


@dataclass
class Plot(TrainerCallback):
    """Draws ``path`` from the state's log history, so that a resumed run has one complete curve."""

    path: Path

    def on_save(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Redraw."""
        self._draw(state)

    def on_train_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Draw the whole run."""
        self._draw(state)

    def _draw(self, state: TrainerState) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for name, label in (("loss", "training"), ("eval_loss", "evaluation")):
            points = [(r["step"], r[name]) for r in state.log_history if name in r]
            if not points:
                continue
            steps, losses = zip(*points, strict=True)
            is_raw = name == "loss" and len(points) > 20
            axes.plot(steps, losses, alpha=0.35 if is_raw else 1.0, label=label, linewidth=1.5)
            if is_raw:
                axes.plot(steps, _smooth(losses), color=axes.lines[-1].get_color(), linewidth=1.8)
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats per token)")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(frameon=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120)
        try:
            write_aside(self.path, buffer.getvalue())
        except OSError as error:  # a picture is not worth stopping for
            logger.warning("could not draw %s", explain(error))


def _smooth(values: Sequence[float]) -> list[float]:
    """Exponential mean with bias correction (as Adam corrects its moments)."""
    smooth, mean = [], 0.0
    for count, value in enumerate(values, start=1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * value
        smooth.append(mean / (1 - SMOOTHING**count))
    return smooth
