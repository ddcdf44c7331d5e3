"""What LLaMA-Factory leaves in the folder of a run: the model at its end, and after ``do_eval`` and
``do_predict`` the metrics and the responses."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import click

from ...cli.table import progress
from ...data.text.prompts import write_rows
from ...errors import RunError
from ...parallel.section import ParallelSection
from ...parallel.sharded_model import with_replicas
from ...parallel.world import joined
from ...recipe.recipe import Recipe
from ...storage import files
from ...training.callback import TrainerState
from ...use.evaluation import held_out, measure, num_batches
from ...use.prediction import Output
from ...use.run_evaluation import (
    Generation,
    adopt,
    comparison,
    evaluated_path,
    generations,
    open_evaluated,
    parts_of_start,
)
from .run_extras import AfterTraining

logger = logging.getLogger(__name__)
PREDICTIONS = "generated_predictions.jsonl"
_DOING = "cannot write the metrics"
_LARGEST = 1 << 28  # bytes of a tokenizer
# Of a checkpoint: weights, which are linked, and the small files beside them, which are copied, as
# scripts edit them in place.
_WEIGHTS = ("model*.safetensors", "adapter_model.safetensors", "value_head.safetensors")
_SMALL = (
    *("*config.json", "*.index.json", "token*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab*", "merges.txt", "*.jinja", "*.model", "*.py", "trainer_state.json"),
)


def place_trained_model(recipe: Recipe, state: TrainerState) -> None:
    """Put the model of the last checkpoint, or of the best one, into the folder of the run."""
    best = state.best_global_step if recipe.train.load_best_model_at_end else None
    folder = recipe.train.folder
    place_model(folder / f"checkpoint-{best or state.global_step}", folder)


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
            with files.open_file(checkpoint / name) as file:
                files.write_aside(folder / name, files.read_all(file, _LARGEST))


def _matching(names: list[str], patterns: tuple[str, ...]) -> Iterator[str]:
    return (name for name in names if any(fnmatch(name, pattern) for pattern in patterns))


def evaluate(recipe: Recipe, after: AfterTraining, model: str | None) -> None:
    """Evaluate ``model`` (see ``evaluate_run``) on the recipe's held-out rows: show the metrics,
    and write LLaMA-Factory's files to the folder of the run. Responses are stored as they are
    generated, and those of an earlier attempt are used.

    Raises as ``evaluate_run`` does, and ``RunError``: a package is missing, or the disk is full."""
    compare = comparison() if after.with_generate else None
    parallel = with_replicas(ParallelSection())
    with joined(parallel) as world:
        path = evaluated_path(recipe, model, world)
        own = parts_of_start(recipe, world, parallel, is_needed=path is None)
        opened, parts = adopt(open_evaluated(recipe, path, None, own, world, parallel), recipe)
        with world.main_first():  # which fills the cache
            examples = [e for source in held_out(own or parts) for e in source.examples]
        with files.raising(RunError, _DOING):
            files.make_folder(recipe.train.folder)
        output, start = Output(recipe.train.folder / PREDICTIONS, force=True), time.monotonic()
        shown = partial(progress, is_shown=world.is_main)
        answers: Sequence[Generation] = ()
        if compare is not None:
            with shown("responses", len(examples)) as advance:
                answers = generations(
                    *(opened, parts, examples),
                    on_answered=advance,
                    output=output,
                    hides_special=after.hides_special,
                )
            metrics = dict(compare([a.answer for a in answers], [a.reference for a in answers]))
        else:
            with shown("loss", num_batches(parts, len(examples))) as advance:
                metrics = measure(opened, parts, examples, on_batch=lambda: advance(1))
        runtime = time.monotonic() - start
        metrics |= {"runtime": runtime, "samples_per_second": len(examples) / runtime}
        if world.is_main:
            _write(output, after.parts, metrics, answers)
        world.wait()  # ranks of other machines remove their own
        if world.is_local_main:
            output.remove_parts()


def _add_results(path: Path, metrics: dict[str, float]) -> None:
    """Add ``metrics`` to those of the run's training, if it was trained."""
    with files.raising(RunError, _DOING), contextlib.suppress(FileNotFoundError, ValueError):
        text = json.dumps(files.read_json(path) | metrics, indent=2, sort_keys=True) + "\n"
        files.write_aside(path, text.encode())


def _write(
    output: Output,
    parts: Sequence[str],
    metrics: dict[str, float],
    answers: Sequence[Generation],
) -> None:
    """Show and write the metrics of each part, and the responses, in LLaMA-Factory's form."""
    written = []
    if "predict" in parts and answers:
        rows = [{"prompt": a.prompt, "predict": a.answer, "label": a.reference} for a in answers]
        write_rows(output.path, rows, doing=output.on_failure)
        written.append(output.path)
    for part in parts:
        of_part = {f"{part}_{name}": value for name, value in metrics.items()}
        path = output.path.with_name(f"{part}_results.json")
        with files.raising(RunError, _DOING):
            text = json.dumps(of_part, indent=4, sort_keys=True) + "\n"
            files.write_aside(path, text.encode())
        written.append(path)
        _add_results(path.with_name("all_results.json"), of_part)
        for name, value in of_part.items():
            click.echo(f"{name}: {value:.4f}")
    click.echo(f"written: {', '.join(map(str, written))}")
