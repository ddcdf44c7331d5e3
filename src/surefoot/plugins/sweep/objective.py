"""By what trials are compared: a metric, its direction, and how a run's log becomes one number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ...data.section import DataSection
from ...errors import RecipeError
from ...recipe.recipe import Recipe, greater_is_better
from ...schema import setting_at

Direction = Literal["minimize", "maximize"]
Record = Mapping[str, object]  # a line of metrics.jsonl
Evaluation = tuple[int, float]  # step and value; NaN stands for what is not finite
_MEANING = {
    "last": "at the last evaluation",
    "best": "at the best evaluation, as the run ends with those weights",
    "tenth": "mean of its logs in the last tenth of the steps",  # one log alone is noise
}


@dataclass(frozen=True)
class Objective:
    """A metric of runs, and how its values over a run become one."""

    metric: str
    direction: Direction
    reduction: Literal["last", "best", "tenth"]

    def __str__(self) -> str:
        return f"{self.direction} {self.metric}, {_MEANING[self.reduction]}"

    def evaluations(self, records: Sequence[Record]) -> list[Evaluation]:
        """The metric at each evaluation so far; none of a metric of training."""
        if self.reduction == "tenth":
            return []
        return [
            (_step(record), _mean([record[self.metric]]))
            for record in records
            # A log may have a metric of this name, too; an evaluation has no training loss.
            if self.metric in record and "loss" not in record
        ]

    def outcome(self, records: Sequence[Record]) -> Evaluation | None:
        """What counts of a run that has ended; None if it has no such metric."""
        if self.reduction == "tenth":
            logs = [record for record in records if "loss" in record and self.metric in record]
            if not logs:
                return None
            tenth = [log for log in logs if _step(log) > _step(logs[-1]) * 9 // 10]
            return _step(logs[-1]), _mean([log[self.metric] for log in tenth])
        evaluations = self.evaluations(records)
        finite = [(step, value) for step, value in evaluations if math.isfinite(value)]
        if self.reduction == "best" and finite:
            best_of = min if self.direction == "minimize" else max
            return best_of(finite, key=lambda evaluation: evaluation[1])
        return evaluations[-1] if evaluations else None


def choose_objective(
    recipe: Recipe, keys: Iterable[str], metric: str | None, direction: Direction | None
) -> Objective:
    """The objective of a sweep over ``keys``: the held-out metric if there are held-out rows, else
    the training loss. Raises ``RecipeError`` if the recipe never computes it, or if it cannot be
    compared."""
    train, has_rows = recipe.train, bool(recipe.data.eval_datasets or recipe.data.val_size)
    if metric is None:
        metric = train.metric_for_best_model if has_rows else "loss"
        for key in keys:
            if meaning := _incomparable(recipe, key, metric):
                raise RecipeError(
                    f"command line: {key} changes {meaning}, so {metric} of two trials does not "
                    "compare; name the metric that decides with --metric, for example "
                    "eval_rewards/accuracies for dpo, or that one if you want it nevertheless"
                )
    is_evaluation = metric.startswith("eval_")
    if is_evaluation and not has_rows:
        raise RecipeError(
            f"--metric {metric}: the recipe has no held-out rows; set data.val_size or "
            "data.eval_datasets, and train.eval_steps"
        )
    if is_evaluation and not (train.eval_steps or train.eval_minutes or train.eval_epoch):
        raise RecipeError(
            f"{metric} decides which trial is best, but the recipe never evaluates; set "
            "train.eval_steps or train.eval_epoch, or choose --metric loss, the training loss"
        )
    if direction is None:
        if (is_greater_better := greater_is_better(recipe, metric)) is None:
            raise RecipeError(
                f"--metric {metric}: whether greater values are better is not known; add "
                "--direction maximize or minimize"
            )
        direction = "maximize" if is_greater_better else "minimize"
    if not is_evaluation:
        return Objective(metric, direction, "tenth")
    has_best = train.load_best_model_at_end and metric == train.metric_for_best_model
    return Objective(metric, direction, "best" if has_best else "last")


def _incomparable(recipe: Recipe, key: str, metric: str) -> str | None:
    """What ``key`` changes so that ``metric`` means something else in each trial."""
    data, is_loss = recipe.data, metric.endswith(("loss", "perplexity"))
    if _is_marked(data, key):
        return None
    if key.startswith("stage") and is_loss:
        return "what the loss is"
    if key == "train.seed" and data.val_size:
        return "which rows data.val_size holds out"
    if key == "model.path" and is_loss:
        return "the tokens that the loss is a mean over"
    if key.startswith("data."):
        return f"the rows or tokens that {metric} is a mean over"
    return None


def _is_marked(data: DataSection, key: str) -> bool:
    """Whether ``key``, or what it is in, says that it changes nothing that metrics are made of."""
    keys = key.split(".")
    ways = (setting_at(Recipe, keys[:end]) for end in range(1, len(keys) + 1))
    return any(
        setting.may_change is not None
        or (setting.same_rows is not None and setting.same_rows.hold(data))
        for setting in ways
        if setting is not None
    )


def _step(record: Record) -> int:
    step = record["step"]
    assert isinstance(step, int)
    return step


def _mean(values: Sequence[object]) -> float:
    """Their mean; NaN if one of them is not finite."""
    numbers = [v for v in values if isinstance(v, int | float) and math.isfinite(v)]
    return sum(numbers) / len(numbers) if len(numbers) == len(values) else math.nan
