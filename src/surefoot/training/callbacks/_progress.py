"""How a run shows that it lives: a live line with rich on a terminal, plain ``key=value`` lines
elsewhere."""

from __future__ import annotations

import contextlib
import logging
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from ...storage.files import exists
from ...storage.remote import Address
from ...terminal_text import duration
from ..arguments import Context
from ..callback import Metrics, TrainerCallback, TrainerControl, TrainerState

logger = logging.getLogger(__name__)


@dataclass
class Screen(TrainerCallback):
    """Shows progress, metrics, the remaining time and the latest checkpoint."""

    console: Console
    _progress: Progress | None = field(default=None, init=False)
    _started: float = field(default=0.0, init=False)
    _first_step: int = field(default=0, init=False)
    _figures: dict[str, str] = field(default_factory=dict, init=False)

    def on_train_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Start the clock and, on a terminal, the live line."""
        self._started, self._first_step = time.monotonic(), state.global_step
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]step"),
                TextColumn("{task.completed}/{task.total}"),
                BarColumn(bar_width=BAR),
                _Figures(self._figures, self.console),
                console=self.console,
                refresh_per_second=4,
            )
            self._progress.add_task("train", total=state.max_steps, completed=state.global_step)
            self._progress.start()

    def on_step_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Update the progress bar."""
        self._figures["left"] = duration(self._seconds_left(state))
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=state.global_step)

    def on_log(
        self, args: Context, state: TrainerState, control: TrainerControl, logs: Metrics
    ) -> None:
        """Show the metrics: in the live line, or as a line of their own."""
        shown = {n: FORMATS[n].format(value) for n, value in logs.items() if n in FORMATS}
        if "loss" in logs:
            shown["memory"] = f"{peak_memory() / 2**30:.1f} GiB"
            self._figures.update(shown)
        if self._progress is None:
            if memory := shown.pop("memory", None):
                shown["peak_memory"] = memory.replace(" ", "")
                shown["eta"] = self._figures.get("left", "?")
            pairs = [f"{name}={value}" for name, value in shown.items()]
            fields = {"event": "log", "step": state.global_step, "max_steps": state.max_steps}
            text, more = " ".join(pairs), {"fields": {**logs, **fields}}
            logger.info("step=%d/%d %s", state.global_step, state.max_steps, text, extra=more)
        elif "loss" not in logs:
            line = Text.assemble(("eval", "cyan"), f" at step {state.global_step}:")
            for name, value in shown.items():
                line.append(f"  {name.removeprefix('eval_')} ").append(value, style="bold")
            with contextlib.suppress(OSError):  # a closed terminal is not worth stopping for
                self._progress.console.print(line)

    def on_save(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Show the name of the checkpoint."""
        self._figures["checkpoint"] = f"checkpoint-{state.global_step}"
        if self._progress is None:
            name, store = f"checkpoint-{state.global_step}", args.section.output_dir
            place: Path | Address = args.output_dir / name
            if isinstance(store, Address) and not exists(args.output_dir / name):
                place = store.inside(name)
            fields = {"event": "save", "step": state.global_step, "checkpoint": str(place)}
            logger.info("saved %s", place, extra={"fields": fields})

    def on_train_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Leave the last state of the live line on the screen."""
        if self._progress is not None:
            with contextlib.suppress(OSError):
                self._progress.stop()
            self._progress = None

    def _seconds_left(self, state: TrainerState) -> float:
        """Remaining seconds, by the speed of this launch: earlier ones may have run elsewhere."""
        done = state.global_step - self._first_step
        if not done:
            return float("inf")
        return (time.monotonic() - self._started) / done * (state.max_steps - state.global_step)


class _Figures(ProgressColumn):
    """As many metrics as fit into the line, in a fixed order; the least important are omitted."""

    def __init__(self, figures: Mapping[str, str], console: Console) -> None:
        super().__init__()
        self.figures, self.console = figures, console

    def render(self, task: Task) -> Text:
        taken = len(f"step {int(task.completed)}/{int(task.total or 0)} ") + BAR + 2
        shown = fitting(self.figures, self.console.width - taken)
        text = Text(no_wrap=True)
        for name, label in LABELS.items():
            if name in shown:
                text.append(f" {label} ", style="dim")
                text.append(self.figures[name])
        return text


def fitting(figures: Mapping[str, str], width: int) -> set[str]:
    """The names of the most important metrics that fit side by side in ``width`` characters."""
    shown = set()
    for name in BY_IMPORTANCE:
        needed = len(LABELS[name]) + len(figures.get(name, "")) + 2
        if name in figures and needed <= width:
            shown.add(name)
            width -= needed
    return shown


FORMATS = {
    "loss": "{:.4f}",
    "grad_norm": "{:.3g}",
    "learning_rate": "{:.3g}",
    "tokens_per_second": "{:,.0f}",
    "reward": "{:.4g}",
    "accuracy": "{:.1%}",
    "rewards/accuracies": "{:.1%}",
    "rewards/margins": "{:.3g}",
    "eval_loss": "{:.4f}",
    "eval_perplexity": "{:.4g}",
    "eval_token_accuracy": "{:.1%}",
    "eval_reward": "{:.4g}",
    "eval_accuracy": "{:.1%}",
    "eval_f1_macro": "{:.4f}",
    "eval_auc": "{:.4f}",
    "eval_rewards/accuracies": "{:.1%}",
    "eval_rewards/margins": "{:.3g}",
}
BAR = 20  # characters
BY_IMPORTANCE = (
    *("loss", "left", "checkpoint", "tokens_per_second", "reward"),
    *("rewards/accuracies", "learning_rate", "grad_norm", "memory", "rewards/margins"),
)
LABELS = {
    "loss": "loss",
    "reward": "reward",
    "rewards/accuracies": "right",
    "rewards/margins": "margin",
    "learning_rate": "lr",
    "grad_norm": "grad",
    "tokens_per_second": "tok/s",
    "memory": "mem",
    "checkpoint": "saved",
    "left": "left",
}


@dataclass
class WarmUp(TrainerCallback):
    """Logs the first step of this launch, which compiles."""

    began: float | None = None
    is_over: bool = False

    def on_step_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Start the clock."""
        if self.began is None:
            self.began = time.monotonic()
            logger.info("step %d compiles the layers, which takes a while", state.global_step + 1)

    def on_step_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Log, once."""
        if self.began is not None and not self.is_over:
            self.is_over = True
            seconds = time.monotonic() - self.began
            logger.info("step %d took %.0f s, most of it to compile", state.global_step, seconds)


def peak_memory() -> int:
    """Bytes of the GPU at most so far, or of this process if there is none."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
