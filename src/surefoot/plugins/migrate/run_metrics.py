"""What people and scripts read of a run of LLaMA-Factory: its log, its metrics, and pictures of its
losses, by its names. The figures are those of ``metrics.jsonl`` and
``all_results.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ...checkpoint.disk.strict_json import finite
from ...errors import RunError
from ...recipe.recipe import Recipe
from ...storage import files
from ...training.arguments import Context
from ...training.callback import Metrics, TrainerCallback, TrainerControl, TrainerState
from ...training.callbacks.metric_files import curve_of, draw

_DOING = "cannot write the metrics"
_LOGGED = {  # name in metrics.jsonl -> name in its log
    "loss": "loss",
    "eval_loss": "eval_loss",
    "reward": "reward",
    "rewards/accuracies": "accuracy",
    "learning_rate": "lr",
    "epoch": "epoch",
}
_TRAIN = ("epoch", "total_flos", "num_input_tokens_seen")  # beside train_...


@dataclass
class TrainerLog(TrainerCallback):
    """Appends every log to ``path``. Times are of training, over all launches."""

    path: Path

    def on_train_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Keep the lines that the log of the run has, and restore those that are missing: those
        that a killed launch wrote after its last save come again."""
        with files.raising(RunError, _DOING):
            content = files.read_file(self.path) if self.path.exists() else b""
            existing = {_key(line): line for line in _complete(content)}
            logs = [_line(logs, state) for logs in state.log_history if "step" in logs]
            text = "".join(f"{json.dumps(existing.get(_key(line), line))}\n" for line in logs)
            if text.encode() != content:
                files.write_aside(self.path, text.encode())

    def on_log(
        self, args: Context, state: TrainerState, control: TrainerControl, logs: Metrics
    ) -> None:
        """Append one line."""
        seconds, steps = state.train_runtime, max(1, state.global_step)
        rest = seconds / steps * (state.max_steps - state.global_step)
        line = _line(logs, state) | {
            "elapsed_time": str(timedelta(seconds=int(seconds))),
            "remaining_time": str(timedelta(seconds=int(rest))),
            "throughput": round(state.num_input_tokens_seen / seconds, 2) if seconds else 0.0,
            "total_tokens": state.num_input_tokens_seen,
        }
        with files.raising(RunError, _DOING):
            files.append_line(self.path, json.dumps(line))


def _line(logs: Metrics, state: TrainerState) -> dict[str, object]:
    """The metrics of a log. Those that are not finite are omitted."""
    step, total = int(logs["step"]), state.max_steps
    names = [name for name in _LOGGED if math.isfinite(logs.get(name, math.nan))]
    return {
        "current_steps": step,
        "total_steps": total,
        **{_LOGGED[name]: logs[name] for name in names},
        "percentage": round(100 * step / total, 2),
    }


def _key(line: Mapping[str, object]) -> tuple[object, bool]:
    """The step, and whether it is a line of training."""
    return line.get("current_steps"), "lr" in line


def _complete(content: bytes) -> list[dict[str, object]]:
    """The lines before the first one that is incomplete or damaged."""
    lines = list[dict[str, object]]()
    for text in content.splitlines(keepends=True):
        try:
            line = files.parse_json(text) if text.endswith(b"\n") else None
        except ValueError:
            line = None
        if not isinstance(line, dict):
            break
        lines.append(line)
    return lines


def write_metrics(recipe: Recipe, state: TrainerState, pictures: Sequence[str]) -> None:
    """Write ``train_results.json`` and ``eval_results.json``, and ``training_NAME.png`` of the
    metrics ``pictures``. The evaluation is that of the step whose model is in the folder."""
    folder = recipe.train.folder
    evaluations = {record["step"]: record for record in state.log_history if "eval_loss" in record}
    best = state.best_global_step if recipe.train.load_best_model_at_end else None
    last = next(reversed(evaluations.values()), {})
    evaluation = evaluations.get(best or state.global_step, last)
    with files.raising(RunError, _DOING):
        results = files.read_json(folder / "all_results.json")
        train = {n: v for n, v in results.items() if n in _TRAIN or n.startswith("train_")}
        for part, metrics in (("train", train), ("eval", dict(evaluation))):
            metrics.pop("step", None)
            if metrics:
                text = json.dumps(finite(metrics), indent=4, sort_keys=True) + "\n"
                files.write_aside(folder / f"{part}_results.json", text.encode())
    for name in pictures:
        points = curve_of(state, name)
        if points[0]:
            draw(folder / f"training_{name.replace('/', '_')}.png", {name: points}, name)
