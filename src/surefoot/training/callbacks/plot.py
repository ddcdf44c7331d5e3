"""``loss.png``: training and evaluation loss over the steps, redrawn at the end, and at saves once
the last picture is old."""

from __future__ import annotations

import io
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...storage.files import explain, write_aside
from ..callback import Context, TrainerCallback, TrainerControl, TrainerState

logger = logging.getLogger(__name__)
NAME = "loss.png"
MARGINS = (0.12, 0.13, 0.86, 0.84)  # left, bottom, width, height; to lay it out costs half as much
WIDTHS = 40  # of half a smoothing window, in the length of the curve


@dataclass
class Plot(TrainerCallback):
    """Draws ``path`` from the state's log history, so that a resumed run has one complete curve."""

    path: Path
    age: float = 30.0
    """Seconds that a picture is good for: training waits for each for a tenth of a second."""
    _drawn: float = field(default_factory=time.monotonic, init=False)

    def on_save(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Redraw, unless the last picture is still good."""
        if time.monotonic() - self._drawn >= self.age:
            self._draw(state)

    def on_train_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Draw the whole run."""
        self._draw(state)

    def _draw(self, state: TrainerState) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4))
        axes = figure.add_axes(MARGINS)
        for label, (steps, losses) in curves(state).items():
            is_raw = label == "training" and len(steps) > 20
            axes.plot(steps, losses, alpha=0.35 if is_raw else 1.0, label=label, linewidth=1.5)
            if is_raw:
                axes.plot(steps, smoothed(losses), color=axes.lines[-1].get_color(), linewidth=1.8)
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
        self._drawn = time.monotonic()


def curves(state: TrainerState) -> dict[str, tuple[list[float], list[float]]]:
    """Steps and losses by the name of the curve: those of ``metrics.jsonl``."""
    by_label = {}
    for name, label in (("loss", "training"), ("eval_loss", "evaluation")):
        points = [(record["step"], record[name]) for record in state.log_history if name in record]
        if points:
            by_label[label] = ([step for step, _ in points], [loss for _, loss in points])
    return by_label


def smoothed(values: Sequence[float]) -> list[float]:
    """Centered means, which do not lag behind the curve. Towards both ends they are of fewer
    values, and the first and the last one are the values themselves."""
    width = max(1, len(values) // WIDTHS)
    means = []
    for at in range(len(values)):
        side = min(width, at, len(values) - 1 - at)
        near = [v for v in values[at - side : at + side + 1] if math.isfinite(v)]
        means.append(sum(near) / len(near) if near else math.nan)
    return means
