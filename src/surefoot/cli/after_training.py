"""What LLaMA-Factory's ``do_eval`` and ``do_predict`` ask of a run, with its files."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from ..errors import RunError
from .loading import loading

if TYPE_CHECKING:
    from ..recipe.from_llamafactory.after_training import AfterTraining
    from ..recipe.recipe import Recipe
    from ..use.run_evaluation import Compare


def comparison() -> Compare:
    """BLEU and ROUGE. Raises ``RunError``: their packages are not installed."""
    try:
        from ..use.benchmarks.text_similarity import similarity
    except ImportError as error:
        raise RunError(
            f"BLEU and ROUGE need the package {error.name}; install it: "
            "pip install 'surefoot[metrics]'"
        ) from None
    return similarity


def evaluate_after(recipe: Recipe, asked: AfterTraining, *, model: str | None) -> None:
    """Evaluate ``model``, None being the trained one, and show the metrics."""
    compare = comparison() if asked.with_generate else None
    from .table import progress

    with loading():
        from ..parallel.generation_sharding import with_replicas
        from ..parallel.section import ParallelSection
        from ..parallel.world import joined
        from ..use.benchmarks.as_llamafactory import run_after_training

    parallel = with_replicas(ParallelSection())
    with joined(parallel) as world:
        shown = partial(progress, is_shown=world.is_main)
        report = run_after_training(
            recipe, asked, world, parallel, model=model, compare=compare, progress=shown
        )
    if world.is_main:
        for metrics in report.metrics.values():
            for name, value in metrics.items():
                click.echo(f"{name}: {value:.4f}")
        click.echo(f"written: {', '.join(map(str, report.files))}")
