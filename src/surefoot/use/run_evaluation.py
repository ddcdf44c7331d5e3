"""Evaluate the model of a run on data that it was not trained on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..batch import Features
from ..checkpoint.disk.commit import named
from ..errors import CheckpointError, RunError
from ..network.network import Network
from ..parallel.section import ParallelSection
from ..parallel.world import World
from ..recipe.recipe import Recipe
from ..storage import files
from ..storage.address import Address
from ..storage.files import make_folder, raising, write_aside
from .auxiliary_outputs import auxiliary_columns, staying
from .evaluation import adopt, measure, num_batches
from .held_out_set import HeldOut, held_out
from .model_loading import LoadedModel, open_start, open_to_measure
from .model_location import locate
from .prediction import Progress
from .responses import Generation, generations

BASE = "base"
# Responses and their references to metrics, as ``benchmarks.text_similarity`` has them.
Compare = Callable[[Sequence[str], Sequence[str]], Mapping[str, float]]


@dataclass(frozen=True)
class DatasetResult:
    """The metrics and the responses of one dataset."""

    name: str
    num_examples: int
    metrics: dict[str, float]  # loss, perplexity, token_accuracy, say
    answers: Sequence[Generation] = field(default=())
    similarity: Mapping[str, float] = field(default_factory=dict)  # of the responses: BLEU, say

    @property
    def matches(self) -> int:
        """Number of responses that equal those of the data."""
        return sum(found.is_match for found in self.answers)

    def as_data(self) -> dict[str, object]:
        """All of it except the texts; NaN and infinite values are null."""
        found: dict[str, object] = {"examples": self.num_examples}
        found |= {n: v if math.isfinite(v) else None for n, v in self.metrics.items()}
        if self.answers:
            found |= {"exact_match": self.matches / len(self.answers)}
            found |= {"matches": self.matches, "answers": len(self.answers), **self.similarity}
        return found


@dataclass(frozen=True)
class EvaluationReport:
    """The results of a model on each dataset."""

    model: str  # a short name
    results: Sequence[DatasetResult]
    similarity: Mapping[str, float] = field(default_factory=dict)  # of all responses

    def compared(self, compare: Compare) -> EvaluationReport:
        """With the similarity of responses to those of the data, by ``compare``."""
        results = [replace(one, similarity=_similarity(one, compare)) for one in self.results]
        return replace(self, results=results, similarity=_similarity(self, compare))

    @property
    def answers(self) -> Sequence[Generation]:
        """Those of all datasets."""
        return [found for result in self.results for found in result.answers]

    @property
    def overall(self) -> DatasetResult:
        """All datasets together. As in training, loss and similar metrics are means over the
        datasets; exact match is over all responses."""
        known = set.intersection(*(set(result.metrics) for result in self.results))
        means = {
            metric: sum(result.metrics[metric] for result in self.results) / len(self.results)
            for metric in self.results[0].metrics
            if metric in known
        }
        count = sum(result.num_examples for result in self.results)
        return DatasetResult("", count, means, self.answers, self.similarity)

    def as_data(self, generations: Path | None) -> dict[str, object]:
        """Everything as plain data; ``generations``: the file of the responses."""
        return {
            "model": self.model,
            **self.overall.as_data(),
            "generations": None if generations is None else str(generations),
            "datasets": {result.name: result.as_data() for result in self.results},
        }

    def write_generations(self, path: Path) -> None:
        """One JSON object per line; an old file is replaced. Raises ``RunError``."""
        lines = [
            json.dumps(
                {
                    "origin": found.origin,
                    "prompt": found.prompt,
                    "reference": found.reference,
                    "answer": found.answer,
                    "match": found.is_match,
                },
                ensure_ascii=False,
            )
            for found in self.answers
        ]
        with raising(RunError, "cannot write the generations"):
            make_folder(path.absolute().parent)
            write_aside(path, ("\n".join(lines) + "\n").encode(errors="replace"))


def evaluate_run(
    recipe: Recipe,
    world: World,
    parallel: ParallelSection,
    *,
    progress: Progress,
    model: str | None = None,
    base: str | None = None,
    dataset: str | None = None,
    limit: int | None = None,
) -> EvaluationReport:
    """Evaluate ``model`` (a checkpoint, any model, or ``base``; by default the run's best or latest
    checkpoint) on the held-out data of a recipe, or ``limit`` examples of another ``dataset``; the
    same on all ranks. ``base`` is that of an adapter, if it moved. Raises ``CheckpointError``,
    ``DataError``, ``ModelError`` or ``RecipeError`` if there is no such model, or nothing to
    evaluate it on."""
    path = evaluated_path(recipe, model, world)
    columns = auxiliary_columns(
        recipe, dataset=dataset, limit=limit, world=world, parallel=parallel
    )
    opened = adopt(open_evaluated(recipe, path, base, world, parallel), recipe)
    with world.main_first():  # which fills the cache
        parts = held_out(recipe, opened.codec, dataset=dataset, limit=limit)
    with staying(recipe, opened.codec, world, parallel) as others:
        results = [
            _evaluate(opened, recipe, part, columns.get(part.name), others, progress)
            for part in parts
        ]
    folder = None if path is None else opened.folder
    return EvaluationReport(BASE if folder is None else folder.name, results)


def _similarity(found: DatasetResult | EvaluationReport, compare: Compare) -> Mapping[str, float]:
    answers = found.answers
    if not answers:
        return {}
    return compare([one.answer for one in answers], [one.reference for one in answers])


def evaluated_path(recipe: Recipe, model: str | None, world: World) -> str | None:
    """Where the model to evaluate is; None: the recipe's own before training. Raises
    ``CheckpointError`` or ``ModelError``: there is none."""
    with world.main_first():  # which downloads what is elsewhere
        path = None if model == BASE else _path(recipe.train.output_dir, model)
        if path is not None:
            locate(path)  # what is missing is said before slow work
    return path


def open_evaluated(
    recipe: Recipe,
    path: str | None,
    base: str | None,
    world: World,
    parallel: ParallelSection,
) -> LoadedModel:
    """The model to evaluate; without a path, the one before training."""
    if path is None:
        return open_start(recipe, world=world, parallel=parallel, heads=recipe.stage.heads)
    return open_to_measure(path, recipe, base=base, world=world, parallel=parallel)


def _path(run: Address | Path, model: str | None) -> str:
    """The model to locate: the run itself, one of its checkpoints, or any other model."""
    if not isinstance(run, Path):
        is_own = (
            model is not None and model.startswith("checkpoint-") and not files.exists(Path(model))
        )
        return f"{run}/{model}" if is_own else model or str(run)
    if model is None:
        if not run.is_dir():
            raise CheckpointError(
                f"{run}: contains no trained model yet; run `surefoot train` first, or use "
                "--model base"
            )
        return str(run)
    if files.is_folder(run / model):
        return str(run / model)
    if model.startswith("checkpoint-") and not files.exists(Path(model)):
        known = ", ".join(path.name for path in named(run)) or "no checkpoint"
        raise CheckpointError(f"--model {model}: {run} has {known}")
    return model


def _evaluate(
    opened: LoadedModel,
    recipe: Recipe,
    part: HeldOut,
    columns: Sequence[Features] | None,
    others: Mapping[str, Network],
    progress: Progress,
) -> DatasetResult:
    count = len(part.examples)
    with progress(f"{part.name}: loss", num_batches(recipe, count)) as advance:
        metrics = measure(
            opened,
            recipe,
            part.examples,
            columns=columns,
            others=others,
            on_batch=lambda: advance(1),
        )
    answers: list[Generation] = []
    if recipe.stage.uses_template and not recipe.stage.spec.is_reward:
        with progress(f"{part.name}: answers", count) as advance:
            answers = generations(opened, recipe, part.examples, on_answered=advance)
    return DatasetResult(part.name, count, metrics, answers)
