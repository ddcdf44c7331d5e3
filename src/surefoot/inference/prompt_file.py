"""Answer a list of prompts with the model that a path names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..data.text.prompts import Prompt
from ..parallel.section import ParallelSection
from ..parallel.world import World
from ..recipe.prediction import Prediction, load
from .conversation import Answer
from .model_loading import open_model
from .prediction import predict
from .run_evaluation import Progress


@dataclass(frozen=True)
class PredictionOptions:
    """Which model answers, and how."""

    path: str  # a run, a checkpoint, a model, or a YAML file
    overrides: Sequence[str] = ()
    system: str | None = None  # for prompts without a system message
    seed: int = 42


def answer_prompts(
    asked: Prediction,
    options: PredictionOptions,
    prompts: Sequence[Prompt],
    world: World,
    parallel: ParallelSection,
    *,
    progress: Progress,
) -> list[Answer]:
    """The answer to every prompt, in order, in every process of ``world``.

    Raises:
        CheckpointError, ModelError: there is no model at the path.
        DataError: a prompt leaves no room for an answer.
    """
    model = asked.model
    opened = open_model(
        model.path,
        adapter=model.adapter,
        base=model.base,
        weights=model.weights,
        dtype=model.dtype,
        trust_remote_code=model.trust_remote_code,
        world=world,
        parallel=parallel,
    )
    section = load(options.path, options.overrides, generate=opened.generate).generate
    system, seed = options.system, options.seed
    with progress("answers", len(prompts)) as advance:
        return predict(opened, prompts, section, system=system, seed=seed, on_answered=advance)
