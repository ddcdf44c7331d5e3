"""By what trials are compared: a metric, its direction, and how a run's log becomes one number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..checkpoint.disk.retention import more_is_better
from ..errors import RecipeError
from ..recipe.recipe import Recipe
from .ranges import SweptKey

PARTS = 10  # of a run: a metric of training is averaged over each
Direction = Literal["minimize", "maximize"]
Record = Mapping[str, object]  # a line of metrics.jsonl
# Settings of data that change neither the held-out rows nor what is computed of them.
_FREE = ("data.packing", "data.shuffle", "data.cache_dir", "data.max_broken_rows", "data.hub")
_FREE_IF_HELD_OUT = ("data.mix_strategy", "data.interleave_probs")


@dataclass(frozen=True)
class ReportedValue:
    """The value of a trial at a step. None is a value that is not finite."""

    step: int
    value: float | None


@dataclass(frozen=True)
class Objective:
    """A metric of runs, and which of its values counts."""

    metric: str
    direction: Direction
    value: Literal["last", "best", "window"]

    @property
    def sign(self) -> int:
        """1 if smaller values are better, else -1."""
        return 1 if self.direction == "minimize" else -1

    def __str__(self) -> str:
        which = {
            "last": "at the last evaluation",
            "best": "at the best evaluation, as the run ends with those weights",
            "window": f"mean of its logs in the last 1/{PARTS} of the steps",
        }
        return f"{self.direction} {self.metric}, {which[self.value]}"

    def reports(
        self, records: Sequence[Record], total: int, *, is_ended: bool = False
    ) -> list[ReportedValue]:
        """The values of a run so far, by step. ``total`` steps is its length; an ended run has
        no records to come."""
        if self.value != "window":
            return [*self._evaluations(records)]
        return [*self._windows(records, total, is_ended)]

    def outcome(self, reports: Sequence[ReportedValue]) -> ReportedValue | None:
        """What counts of all reports of an ended run; None if there is none."""
        finite = [report for report in reports if report.value is not None]
        if self.value == "best" and finite:
            return min(finite, key=lambda report: self.sign * (report.value or 0.0))
        return reports[-1] if reports else None

    def _evaluations(self, records: Sequence[Record]) -> Iterator[ReportedValue]:
        for record in records:
            if self.metric in record and "loss" not in record:
                yield ReportedValue(_step(record), _finite(record[self.metric]))

    def _windows(
        self, records: Sequence[Record], total: int, is_ended: bool
    ) -> Iterator[ReportedValue]:
        logs = [record for record in records if "loss" in record and self.metric in record]
        reached = _step(logs[-1]) if logs else 0
        for part in range(PARTS):
            first, last = total * part // PARTS, total * (part + 1) // PARTS
            inside = [r for r in logs if first < _step(r) <= last]
            if inside and (reached >= last or is_ended):
                yield ReportedValue(min(last, reached), _mean([r[self.metric] for r in inside]))


def choose_objective(
    recipe: Recipe, keys: Sequence[SweptKey], metric: str | None, direction: str | None
) -> Objective:
    """The objective of a sweep: the held-out metric if there are held-out rows, else the training
    loss. Raises ``RecipeError`` if the recipe never computes it, or if it cannot be compared."""
    train, has_rows = recipe.train, bool(recipe.data.eval_datasets or recipe.data.val_size)
    evaluates = train.eval_steps or train.eval_minutes or train.eval_epoch
    if metric is None:
        metric = train.metric_for_best_model if has_rows else "loss"
        for key in keys:
            _must_compare(recipe, key, metric)
    is_evaluation = metric.startswith("eval_")
    if is_evaluation and not has_rows:
        raise RecipeError(
            f"--metric {metric}: the recipe has no held-out rows; set data.val_size or "
            "data.eval_datasets, and train.eval_steps"
        )
    if is_evaluation and not evaluates:
        raise RecipeError(
            f"{metric} decides which trial is best, but the recipe never evaluates; set "
            "train.eval_steps or train.eval_epoch, or choose --metric loss, the training loss"
        )
    value: Literal["last", "best", "window"] = "last" if is_evaluation else "window"
    is_own = metric == train.metric_for_best_model
    if is_evaluation and is_own and train.load_best_model_at_end:
        value = "best"
    greater = train.is_greater_better if is_own else more_is_better(metric)
    if direction is not None:
        greater = direction == "maximize"
    return Objective(metric, "maximize" if greater else "minimize", value)


def _must_compare(recipe: Recipe, key: SweptKey, metric: str) -> None:
    """Raise ``RecipeError`` if ``metric`` means something else in each trial."""
    data, is_loss = recipe.data, metric.endswith(("loss", "perplexity"))
    if key.path[0] == "stage" and is_loss:
        what = "what the loss is"
    elif key.key == "train.seed" and data.val_size:
        what = "which rows data.val_size holds out"
    elif key.key == "model.path" and is_loss:
        what = "the tokens that the loss is a mean over"
    elif key.path[0] == "data" and not _is_free(recipe, key.key):
        what = f"the rows or tokens that {metric} is a mean over"
    else:
        return
    raise RecipeError(
        f"command line: {key.key}={key.text}: changes {what}, so {metric} of two trials does not "
        "compare; name the metric that decides with --metric, for example "
        "eval_rewards/accuracies for dpo, or that one if you want it nevertheless"
    )


def _is_free(recipe: Recipe, key: str) -> bool:
    data = recipe.data
    is_held_out = bool(data.val_size or data.eval_datasets)
    if key == "data.datasets":
        return bool(data.eval_datasets)
    return key in _FREE or (is_held_out and key in _FREE_IF_HELD_OUT)


def _step(record: Record) -> int:
    step = record["step"]
    assert isinstance(step, int)
    return step


def _finite(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]


def _mean(values: Sequence[object]) -> float | None:
    """Their mean; None if one of them is not finite."""
    found = [_finite(value) for value in values]
    numbers = [value for value in found if value is not None]
    return sum(numbers) / len(numbers) if numbers and len(numbers) == len(found) else None
