"""Files that scripts read of a run of LLaMA-Factory: ``trainer_log.jsonl`` as the run trains, and
at its end ``training_loss.png``, ``train_results.json`` and the model.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatch
from pathlib import Path

from ...errors import RunError
from ...recipe.recipe import Recipe
from ...storage import files
from ...training.callback import Context, Metrics, TrainerCallback, TrainerControl, TrainerState
from ...training.callbacks.plot import NAME as PLOT

logger = logging.getLogger(__name__)
LOG = "trainer_log.jsonl"
_LARGEST = 1 << 28  # bytes of a log, of a picture, of a tokenizer
_NAMES = {  # in the log of LLaMA-Factory, and in that of a run
    "loss": "loss",
    "eval_loss": "eval_loss",
    "accuracy": "rewards/accuracies",
    "lr": "learning_rate",
    "epoch": "epoch",
}
# Of a checkpoint: weights, which are linked, and the small files beside them, which are copied, as
# scripts edit them in place.
_WEIGHTS = ("model*.safetensors", "adapter_model.safetensors", "value_head.safetensors")
_SMALL = (
    *("*config.json", "*.index.json", "token*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab*", "merges.txt", "*.jinja", "*.model", "*.py", "trainer_state.json"),
)


@dataclass
class TrainerLog(TrainerCallback):
    """Appends a line to the log in ``folder`` for each log; a resumed run repeats no step."""

    folder: Path
    _began: float = field(default=0.0, init=False)
    _first: int = field(default=0, init=False)

    @property
    def path(self) -> Path:
        """The log."""
        return self.folder / LOG

    def on_train_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Keep the lines of the steps that the run has saved."""
        self._began, self._first = time.monotonic(), state.global_step
        with files.raising(RunError, LOG):
            if files.exists(self.path):
                kept = [line for line in self._lines() if _step(line) <= state.global_step]
                files.write_aside(self.path, b"".join(line + b"\n" for line in kept))

    def on_log(
        self, args: Context, state: TrainerState, control: TrainerControl, logs: Metrics
    ) -> None:
        """Append one line with the names of LLaMA-Factory."""
        step, seconds = state.global_step, time.monotonic() - self._began
        left = (state.max_steps - step) * seconds / max(1, step - self._first)
        tokens = state.num_input_tokens_seen
        line = {
            "current_steps": step,
            "total_steps": state.max_steps,
            **{name: logs[own] for name, own in _NAMES.items() if own in logs},
            "percentage": round(100 * step / max(1, state.max_steps), 2),
            "elapsed_time": str(timedelta(seconds=int(seconds))),
            "remaining_time": str(timedelta(seconds=int(left))),
            "total_tokens": tokens,
        }
        with files.raising(RunError, LOG):
            files.append_line(self.path, json.dumps(line))

    def _lines(self) -> list[bytes]:
        with files.open_file(self.path) as file:
            return files.read_all(file, _LARGEST).splitlines()


def _step(line: bytes) -> float:
    """The step of a line; infinite if it cannot be read, as after a crash."""
    try:
        return int(json.loads(line)["current_steps"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def finish(recipe: Recipe, state: TrainerState) -> None:
    """Write the results of a run, and put its model into its folder."""
    folder = recipe.train.folder
    write_results(folder, state, recipe.train.global_batch_size)
    best = state.best_global_step if recipe.train.load_best_model_at_end else None
    place_model(folder / f"checkpoint-{best or state.global_step}", folder)


def write_results(folder: Path, state: TrainerState, batch_size: int) -> None:
    """Write ``train_results.json`` and ``training_loss.png`` into the ``folder`` of a run."""
    seconds = max(1e-9, state.train_runtime)
    results = {
        "epoch": state.epoch,
        "total_flos": state.total_flos,
        "train_loss": state.train_loss_total / max(1, state.global_step - state.num_skipped_steps),
        "train_runtime": round(state.train_runtime, 4),
        "train_samples_per_second": round(state.global_step * batch_size / seconds, 3),
        "train_steps_per_second": round(state.global_step / seconds, 3),
    }
    with files.raising(RunError, "train_results.json"):
        text = json.dumps(results, indent=4, sort_keys=True) + "\n"
        files.write_aside(folder / "train_results.json", text.encode())
        if files.exists(folder / PLOT):
            files.write_aside(folder / "training_loss.png", _content(folder / PLOT))


def place_model(checkpoint: Path, folder: Path) -> None:
    """Put the model of ``checkpoint`` into the ``folder`` of its run: weights as hard links, which
    take no space, other files as copies. Weights in a folder for each rank stay there."""
    names = files.list_folder(checkpoint)
    weights = list(_matching(names, _WEIGHTS))
    if not weights:
        logger.info("%s: each rank has its weights, so they are not in %s", checkpoint, folder)
        return
    with files.raising(RunError, f"the model in {folder}"):
        for name in weights:
            aside = folder / f".{name}.part"
            aside.unlink(missing_ok=True)
            if not files.share(checkpoint / name, aside):
                logger.warning("%s has no hard links: the model stays in %s", folder, checkpoint)
                return
            files.rename(aside, folder / name)
            aside.unlink(missing_ok=True)  # of a link to the same file, which rename leaves
        for name in _matching(names, _SMALL):
            files.write_aside(folder / name, _content(checkpoint / name))


def _matching(names: list[str], patterns: tuple[str, ...]) -> Iterator[str]:
    return (name for name in names if any(fnmatch(name, pattern) for pattern in patterns))


def _content(path: Path) -> bytes:
    with files.open_file(path) as file:
        return files.read_all(file, _LARGEST)
