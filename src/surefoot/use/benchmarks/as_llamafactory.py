"""What LLaMA-Factory does after training: ``do_eval`` and ``do_predict``, with its files."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...batch import OutputSpec
from ...data.example import Example
from ...data.text.answers import write_rows
from ...data.text.collation import collate
from ...errors import RunError
from ...model.pretrained.loading import device
from ...parallel.section import ParallelSection
from ...parallel.world import World
from ...recipe.from_llamafactory.after_training import AfterTraining
from ...recipe.recipe import Recipe
from ...storage.files import make_folder, raising, write_aside
from ..answer_journal import Output
from ..evaluation import adopt, encoded, measure, num_batches, ready_to_measure
from ..held_out_set import held_out
from ..model_loading import LoadedModel
from ..prediction import Progress
from ..responses import Generation, generations
from ..run_evaluation import Compare, evaluated_path, open_evaluated

PREDICTIONS = "generated_predictions.jsonl"


@dataclass(frozen=True)
class AfterReport:
    """The metrics of each part, eval and predict, with the names of LLaMA-Factory."""

    metrics: Mapping[str, Mapping[str, float]]
    files: Sequence[Path]


@dataclass(frozen=True)
class _Task:
    """A model with the rows that it is evaluated on."""

    opened: LoadedModel
    recipe: Recipe
    asked: AfterTraining
    compare: Compare | None
    examples: Sequence[Example]
    output: Output  # of the responses
    progress: Progress


def run_after_training(
    recipe: Recipe,
    asked: AfterTraining,
    world: World,
    parallel: ParallelSection,
    *,
    model: str | None,
    compare: Compare | None,
    progress: Progress,
) -> AfterReport:
    """Evaluate ``model`` (see ``evaluate_run``) on the recipe's held-out rows as ``asked``, and
    write LLaMA-Factory's files to the folder of the run; a collective call. ``compare`` (see
    ``similarity``) gives the metrics of responses and their references; without it, the loss is
    measured. Responses are stored as they are generated, and those of an earlier attempt are used.
    Raises as ``evaluate_run`` does, and ``RunError``: the disk is full."""
    path = evaluated_path(recipe, model, world)
    opened = adopt(open_evaluated(recipe, path, None, world, parallel), recipe)
    with world.main_first():  # which fills the cache
        examples = [e for part in held_out(recipe, opened.codec) for e in part.examples]
    with raising(RunError, "cannot write the metrics"):
        make_folder(recipe.train.folder)
    output = Output(recipe.train.folder / PREDICTIONS, force=True)
    task = _Task(opened, recipe, asked, compare, examples, output, progress)
    found: dict[str, dict[str, float]] = {}
    written: list[Path] = []
    for part in asked.parts:
        start = time.monotonic()
        metrics, answers = _measured(task)
        runtime = time.monotonic() - start
        metrics |= {"runtime": runtime, "samples_per_second": len(examples) / runtime}
        found[part] = {f"{part}_{name}": value for name, value in metrics.items()}
        if world.is_main:
            written += _write(task, part, found[part], answers)
    world.wait()  # ranks of other machines remove their own
    if world.is_local_main:
        output.remove_parts()
    return AfterReport(found, written)


def _measured(task: _Task) -> tuple[dict[str, float], Sequence[Generation]]:
    """The metrics, and the responses if there are any."""
    recipe, examples = task.recipe, task.examples
    if task.compare is not None:
        with task.progress("responses", len(examples)) as advance:
            answers = generations(
                task.opened,
                recipe,
                examples,
                on_answered=advance,
                output=task.output,
                hides_special=task.asked.hides_special,
            )
        texts = [one.answer for one in answers], [one.reference for one in answers]
        return dict(task.compare(*texts)), answers
    with task.progress("loss", num_batches(recipe, len(examples))) as advance:
        metrics = measure(task.opened, recipe, examples, on_batch=lambda: advance(1))
    if task.asked.by_row:
        metrics["accuracy"] = accuracy_by_row(task.opened, recipe, examples)
    return metrics, ()


def accuracy_by_row(opened: LoadedModel, recipe: Recipe, examples: Sequence[Example]) -> float:
    """The share of trained tokens of an example that are the most probable ones, averaged over the
    examples, whatever their lengths."""
    items, size = encoded(recipe.stage, examples, opened.codec), recipe.train.fixed_micro_batch_size
    shares: list[float] = []
    plain = replace(recipe, data=replace(recipe.data, packing=False))
    with ready_to_measure(opened, plain) as network, network.evaluating():
        for start in range(0, len(items), size):
            batch = collate(items[start : start + size], packing=False).to(device())
            found = network.forward(batch, OutputSpec(("predictions",)))
            assert found.predictions is not None
            assert batch.at is not None
            right = (found.predictions == batch.at.labels).cpu().numpy()
            rows = batch.at.rows.cpu().numpy()
            shares += [float(right[rows == row].mean()) for row in np.unique(rows)]
    return float(np.mean(shares))


def _write(
    task: _Task, part: str, metrics: Mapping[str, float], answers: Sequence[Generation]
) -> list[Path]:
    """The files of a part, in the form of LLaMA-Factory."""
    path = task.output.path.with_name(f"{part}_results.json")
    with raising(RunError, "cannot write the metrics"):
        text = json.dumps(dict(metrics), indent=4, sort_keys=True) + "\n"
        write_aside(path, text.encode())
    if part != "predict" or task.compare is None:
        return [path]
    rows = [{"prompt": a.prompt, "predict": a.answer, "label": a.reference} for a in answers]
    write_rows(task.output.path, rows, doing=task.output.on_failure)
    return [task.output.path, path]
