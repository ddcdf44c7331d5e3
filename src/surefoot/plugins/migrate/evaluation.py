"""What LLaMA-Factory does after training: ``do_eval`` and ``do_predict``, with its files."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import click
import numpy as np

from ...batch import OutputSpec
from ...cli.eval import comparison
from ...cli.table import progress
from ...data.example import Example
from ...data.text.collation import collate
from ...data.text.prompts import write_rows
from ...errors import RunError
from ...model.loading import device
from ...parallel.section import ParallelSection
from ...parallel.sharded_model import with_replicas
from ...parallel.world import joined
from ...recipe.recipe import Recipe
from ...storage.files import make_folder, raising, write_aside
from ...use.answer_journal import Output
from ...use.evaluation import adopt, encoded, held_out, measure, num_batches, ready_to_measure
from ...use.model_loading import LoadedModel
from ...use.run_evaluation import Generation, evaluated_path, generations, open_evaluated
from .run_extras import AfterTraining

PREDICTIONS = "generated_predictions.jsonl"
_DOING = "cannot write the metrics"


def evaluate(recipe: Recipe, asked: AfterTraining, model: str | None) -> None:
    """Evaluate ``model`` (see ``evaluate_run``) on the recipe's held-out rows as ``asked``: show
    the metrics, and write LLaMA-Factory's files to the folder of the run. Responses are stored as
    they are generated, and those of an earlier attempt are used.

    Raises as ``evaluate_run`` does, and ``RunError``: a package is missing, or the disk is full."""
    compare = comparison() if asked.with_generate else None
    parallel = with_replicas(ParallelSection())
    with joined(parallel) as world:
        path = evaluated_path(recipe, model, world)
        opened = adopt(open_evaluated(recipe, path, None, world, parallel), recipe)
        with world.main_first():  # which fills the cache
            examples = [e for part in held_out(recipe, opened.codec) for e in part.examples]
        with raising(RunError, _DOING):
            make_folder(recipe.train.folder)
        output, start = Output(recipe.train.folder / PREDICTIONS, force=True), time.monotonic()
        shown = partial(progress, is_shown=world.is_main)
        answers: Sequence[Generation] | None = None
        if compare is not None:
            with shown("responses", len(examples)) as advance:
                answers = generations(
                    *(opened, recipe, examples),
                    on_answered=advance,
                    output=output,
                    hides_special=asked.hides_special,
                )
            metrics = dict(compare([a.answer for a in answers], [a.reference for a in answers]))
        else:
            with shown("loss", num_batches(recipe, len(examples))) as advance:
                metrics = measure(opened, recipe, examples, on_batch=lambda: advance(1))
            if asked.by_row:
                metrics["accuracy"] = accuracy_by_row(opened, recipe, examples)
        runtime = time.monotonic() - start
        metrics |= {"runtime": runtime, "samples_per_second": len(examples) / runtime}
        if world.is_main:
            _write(output, asked, metrics, answers)
        world.wait()  # ranks of other machines remove their own
        if world.is_local_main:
            output.remove_parts()


def _write(
    output: Output,
    asked: AfterTraining,
    metrics: Mapping[str, float],
    answers: Sequence[Generation] | None,
) -> None:
    """Show and write the metrics of each part, and the responses, in LLaMA-Factory's form."""
    written = []
    if "predict" in asked.parts and answers is not None:
        rows = [{"prompt": a.prompt, "predict": a.answer, "label": a.reference} for a in answers]
        write_rows(output.path, rows, doing=output.on_failure)
        written.append(output.path)
    for part in asked.parts:
        named = {f"{part}_{name}": value for name, value in metrics.items()}
        path = output.path.with_name(f"{part}_results.json")
        with raising(RunError, _DOING):
            text = json.dumps(named, indent=4, sort_keys=True) + "\n"
            write_aside(path, text.encode())
        written.append(path)
        for name, value in named.items():
            click.echo(f"{name}: {value:.4f}")
    click.echo(f"written: {', '.join(map(str, written))}")


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
