"""Evaluate the model of a run on data that it was not trained on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from .auxiliary_outputs import auxiliary_columns, models_of_windows
from .evaluation import adopt, measure, num_batches
from .held_out_set import HeldOut, held_out
from .model_loading import LoadedModel, open_model, open_start
from .model_location import locate
from .prediction import Progress
from .responses import Generation, generations

BASE = "base"


@dataclass(frozen=True)
class DatasetResult:
    """The metrics and the responses of one dataset."""

    name: str
    num_examples: int
    metrics: dict[str, float]  # loss, perplexity, token_accuracy, say
    answers: Sequence[Generation] = field(default=())

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
            found |= {"matches": self.matches, "answers": len(self.answers)}
        return found


@dataclass(frozen=True)
class EvaluationReport:
    """The results of a model on each dataset."""

    model: str  # a short name
    results: Sequence[DatasetResult]

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
        return DatasetResult("", count, means, self.answers)

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
    with world.main_first():  # which downloads what is elsewhere
        path = None if model == BASE else _path(recipe.train.output_dir, model)
        if path is not None:
            locate(path)  # what is missing is said before slow work
    columns = auxiliary_columns(
        recipe, dataset=dataset, limit=limit, world=world, parallel=parallel
    )
    opened = adopt(_open(recipe, path, base, world, parallel), recipe)
    with world.main_first():  # which fills the cache
        parts = held_out(recipe, opened.codec, dataset=dataset, limit=limit)
    with models_of_windows(recipe, opened.codec, world, parallel) as others:
        results = [
            _evaluate(opened, recipe, part, columns.get(part.name), others, progress)
            for part in parts
        ]
    folder = None if path is None else opened.folder
    return EvaluationReport(BASE if folder is None else folder.name, results)


def _open(
    recipe: Recipe,
    path: str | None,
    base: str | None,
    world: World,
    parallel: ParallelSection,
) -> LoadedModel:
    """The model to evaluate; without a path, the one before training."""
    if path is None:
        return open_start(recipe, world=world, parallel=parallel)
    return open_model(
        path,
        base=base,
        dtype=recipe.model.dtype,
        trust_remote_code=recipe.model.trust_remote_code,
        world=world,
        parallel=parallel,
    )


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
