"""``surefoot train``: from a recipe to tuned weights; the same command resumes."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

from .loading import loading, start_ranks


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option(
    "--trust-pickle",
    is_flag=True,
    help="Read the pickles in a checkpoint of Hugging Face's Trainer, if checkpoint.resume names "
    "one: tensors and plain values, nothing else.",
)
def train(recipe: Path, overrides: tuple[str, ...], trust_pickle: bool) -> None:
    """Train as RECIPE says, a YAML file or the folder of a run.

    OVERRIDES are dotted fields such as optim.adamw.learning_rate=5e-5.

    If train.output_dir contains a checkpoint, training resumes from the latest one that passes
    verification. On Ctrl-C or SIGTERM it finishes the step, saves, and exits with 128 + the
    signal's number.
    """
    with loading():
        from surefoot.recipe.recipe import load

    _refuse_checkpoint(recipe)
    loaded = load(recipe, overrides)  # what is wrong with it is said before the slow imports
    start_ranks(loaded.parallel)
    with loading():
        from surefoot.run.training_run import run

        for name in loaded.method.packages:
            importlib.import_module(name)

    outcome = run(loaded, trust_pickle=trust_pickle)
    if outcome.signal is not None:
        click.echo(
            f"stopped at step {outcome.state.global_step} by {outcome.signal.name}, saved; run "
            "the same command to resume",
            err=True,
        )
        raise SystemExit(128 + outcome.signal)


def _refuse_checkpoint(path: Path) -> None:
    """A run's folder means that run. From a checkpoint, a run would resume at a later one."""
    from surefoot.errors import RecipeError
    from surefoot.recipe.files import is_checkpoint

    if is_checkpoint(path):
        raise RecipeError(
            f"{path}: is a checkpoint. To resume its run, name {path.absolute().parent}; to train "
            f"from here in another folder, use its recipe with checkpoint.resume={path} and "
            "train.output_dir"
        )
