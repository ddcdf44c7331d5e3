"""Metrics of a policy on held-out examples, without changing anything the training uses.

An evaluation takes the path of training: windows of the set in order, with precomputed columns,
prepared by the stage, then assigned to ranks and micro-batches. Each rank measures its share.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch

from ..batch import Batch, Features, Loss, with_router_loss
from ..data.data_order import Index
from ..data.order.micro_batches import Collation, in_turn
from ..data.store.dataset import EncodedDataset
from ..errors import RunError
from ..model.loading import device
from ..network.network import Network
from ..parallel.progress import wait_for_ranks
from ..parallel.world import World
from .callback import Callbacks, PolicyVersion, TrainerState
from .context import NetworkContext
from .kept_rollouts import KeptRollouts
from .out_of_memory import MemoryGuard
from .section import TrainSection
from .stage import POLICY, Stage
from .windows import Columns, Place, StageState

logger = logging.getLogger(__name__)
EVALUATION = -1  # in the place of an epoch: seeds of evaluations are their own


@dataclass(frozen=True)
class EvaluationSet:
    """Held-out examples, with the precomputed columns of their windows."""

    examples: EncodedDataset | Sequence[Features]
    kept: Columns


def windows_of(count: int, size: int) -> dict[Place, Index]:
    """The windows of ``count`` examples in order, the last one perhaps smaller. A single example at
    the end belongs to the window before it: some stages compare the examples of a window."""
    starts = [*range(0, max(1, count - (size > 1)), size), count]
    windows = enumerate(pairwise(starts))
    return {(EVALUATION, n): np.arange(start, end) for n, (start, end) in windows}


@dataclass(frozen=True)
class Evaluation:
    """How the policy of a run is measured."""

    stage: Stage
    network: Network
    context: Callable[[Place], NetworkContext]
    collation: Collation
    memory: MemoryGuard
    window_size: int  # examples
    world: World
    stage_state: StageState = field(default_factory=StageState)  # of training, which is only read
    kept: KeptRollouts = field(default_factory=KeptRollouts)
    version: PolicyVersion = field(default_factory=PolicyVersion)  # which ``context`` reads

    def measure(self, held_out: EvaluationSet, after: Callable[[], None]) -> dict[str, float]:
        """``loss`` (nats per unit of weight), its related metrics, and metrics of the windows. The
        same on all ranks. ``after`` is called after every batch and may raise to stop."""
        return self.memory.forward(lambda size: self._measure(held_out, after, size))

    def _measure(
        self, held_out: EvaluationSet, after: Callable[[], None], size: int
    ) -> dict[str, float]:
        losses, figures, judged = list[Loss](), dict[str, float](), list[torch.Tensor]()
        self.kept.begin()
        with self.network.evaluating():
            for batch in self._batches(held_out, figures, size):
                outputs = self.network.forward(batch, self.stage.eval_spec)
                loss = self.stage.loss(POLICY, outputs, batch)
                losses.append(with_router_loss(loss, outputs).detach())
                if (rows_EX := self.stage.judged(outputs, batch)) is not None:
                    judged.append(rows_EX)
                after()
        names = list(dict.fromkeys(name for loss in losses for name in loss.metrics))
        rows = [
            [loss.total, loss.weight, *(loss.metrics.get(name, 0.0) for name in names)]
            for loss in losses
        ]
        here = [sum(map(float, column)) for column in zip(*rows, strict=True)] or [0.0, 0.0]
        total, weight, *values = self.world.sums(here)
        means = {"loss": total / weight if weight else float("nan")}
        if weight:
            means |= {name: value / weight for name, value in zip(names, values, strict=True)}
        count = len(held_out.examples)
        means = {**self.stage.metrics(means), **{n: v / count for n, v in figures.items()}}
        return {**means, **self._summary(judged)}

    def _summary(self, judged: Sequence[torch.Tensor]) -> Mapping[str, float]:
        """The metrics of all examples together, from those of each rank."""
        here = [wait_for_ranks(rows.cpu).numpy() for rows in judged]
        parts = self.world.gathered(here if self.world.is_first_of_share else [])
        rows = [rows_EX for part in parts for rows_EX in part]
        if not rows:
            return {}
        rows_EX = np.concatenate(rows).astype(np.float64)
        rows_EX = rows_EX[~np.isnan(rows_EX).any(1)]
        return self.stage.summary(rows_EX) if len(rows_EX) else {}

    def _batches(
        self, held_out: EvaluationSet, figures: dict[str, float], size: int
    ) -> Iterator[Batch]:
        """This rank's micro-batches of all windows. Metrics of these are added to ``figures``, each
        times the examples of its window."""
        for place, items in windows_of(len(held_out.examples), self.window_size).items():
            context = self.context(place)
            with self.world.together():
                read = [held_out.examples[int(item)] for item in items]
                loaded = held_out.kept.added(place, read)
            prepared = self.stage.prepare(context, loaded)
            self.kept.add(context, context.recorded, prepared.examples)
            for name, value in prepared.figures.items():
                figures[name] = figures.get(name, 0.0) + value * len(items)
            ranks = self.world.data_rank, self.world.num_data_ranks
            collation = self.collation.among(prepared.examples, self.world.num_data_ranks)
            for group in in_turn(len(prepared.examples), size, *ranks):
                with self.world.together():
                    batch = collation.batch_of(group, prepared.examples).to(device())
                yield batch


def prefixed(parts: Mapping[str, Mapping[str, float]], prefix: str) -> dict[str, float]:
    """``{"": m}`` as ``eval_loss``; several datasets as ``eval_NAME_loss`` and their mean as
    ``eval_loss``."""
    if list(parts) == [""]:
        return {f"{prefix}_{name}": value for name, value in parts[""].items()}
    by_dataset = {
        f"{prefix}_{dataset}_{name}": value
        for dataset, metrics in parts.items()
        for name, value in metrics.items()
    }
    common = set.intersection(*(set(metrics) for metrics in parts.values()))
    means = {
        f"{prefix}_{name}": sum(m[name] for m in parts.values()) / len(parts)
        for name in sorted(common)
    }
    return by_dataset | means


def speeds(prefix: str, seconds: float, counts: Mapping[str, int]) -> dict[str, float]:
    """``eval_runtime``, and ``eval_samples_per_second`` and so on of ``counts``, by the names of
    the Hugging Face Trainer."""
    rate = 1 / seconds if seconds else 0.0
    rates = {f"{prefix}_{name}_per_second": count * rate for name, count in counts.items()}
    return {f"{prefix}_runtime": seconds, **rates}


def record_evaluation(
    section: TrainSection, callbacks: Callbacks, metrics: Mapping[str, float]
) -> None:
    """Log ``metrics``, update the best step and the schedule, call the callbacks. With
    ``load_best_model_at_end`` a new best is always saved. Raises ``RunError`` if
    ``metric_for_best_model`` is not among them."""
    state, control = callbacks.state, callbacks.control
    record = {"step": state.global_step, "epoch": state.epoch, **metrics}
    state.log_history.append(record)
    callbacks.emit("on_log", logs=record)
    name = str(section.metric_for_best_model)
    check_metric(name, metrics)
    best = state.best_metric
    if is_better(metrics[name], state.best_metric, greater=section.is_greater_better):
        state.best_metric, state.best_global_step = metrics[name], state.global_step
        control.should_save |= section.load_best_model_at_end
    schedule, greater = callbacks.args.learner.step.schedule, section.is_greater_better
    schedule.evaluated(name, metrics[name], state.global_step, greater=greater)
    callbacks.emit_evaluated(metrics, best)


def check_metric(name: str, metrics: Mapping[str, float]) -> None:
    """Raise ``RunError`` if evaluations have no metric with the ``name`` of
    ``metric_for_best_model``."""
    if name not in metrics:
        error = RunError(
            f"train.metric_for_best_model: no metric {name!r}; "
            f"expected one of {', '.join(sorted(metrics))}"
        )
        error.is_everywhere = True  # all ranks have the same metrics
        raise error


def first_window(held_out: EvaluationSet, size: int) -> EvaluationSet:
    """The examples of the first window of ``size``, for a look at what an evaluation gives."""
    items = windows_of(len(held_out.examples), size)[EVALUATION, 0]
    return replace(held_out, examples=[held_out.examples[int(item)] for item in items])


def settle_best(
    section: TrainSection, state: TrainerState, rows: str, is_saved: Callable[[int], bool]
) -> None:
    """Find the best evaluation of a resumed run again, by the metric, direction and ``rows`` of
    now. If the run is to end with it, it is one whose checkpoint ``is_saved``."""
    judged, metric = state.judgement, str(section.metric_for_best_model)  # a plain one is saved
    greater, has_other_rows = section.is_greater_better, judged.rows not in (None, rows)
    is_compared_alike = (judged.metric, judged.greater) in ((None, None), (metric, greater))
    if has_other_rows:
        judged.since = state.global_step
        logger.warning(
            "what is evaluated, or what measures it, has changed since step %d: the best metric, "
            "early stopping and the like start again with the next evaluation",
            state.global_step,
        )
    if has_other_rows or not is_compared_alike:
        state.reductions.best, state.reductions.num_bad = None, 0
    judged.metric, judged.greater, judged.rows = metric, greater, rows
    former = state.best_global_step
    state.best_metric = state.best_global_step = None
    for step, value in state.evaluated(metric).items():
        is_there = not section.load_best_model_at_end or is_saved(step)
        if is_there and is_better(value, state.best_metric, greater=greater):
            state.best_metric, state.best_global_step = value, step
    if has_other_rows or former in (None, state.best_global_step):
        return
    best = "none of those that are left"
    if state.best_global_step is not None:
        best = f"checkpoint-{state.best_global_step}, {metric} {state.best_metric:.4g}"
    why = f"is not the best by {metric}"
    if section.load_best_model_at_end and not is_saved(former):
        why = "is not in the folder of this run"
    logger.warning("checkpoint-%d, the best so far, %s; the best is now %s", former, why, best)


def is_better(new: float, old: float | None, *, greater: bool, by: float = 0.0) -> bool:
    """Whether ``new`` beats ``old`` by more than ``by``; nan never does, anything beats None."""
    if math.isnan(new):
        return False
    if old is None:
        return True
    return new > old + by if greater else new < old - by
