"""``surefoot train``: from a recipe to tuned weights; the same command resumes."""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import SKIPPED_STEPS, counted
from ..terminal_text import visible
from .after_training import comparison, evaluate_after
from .loading import loading, start_ranks

if TYPE_CHECKING:
    from ..recipe.from_llamafactory.after_training import AfterTraining
    from ..recipe.from_llamafactory.conversion import Translation
    from ..recipe.recipe import Recipe
    from ..run.folder import SizeChoice
    from ..run.from_python.outcome import Outcome
    from ..training.state import TrainerState

_WRITTEN = ("metrics.jsonl", "loss.png", "all_results.json")  # as far as they exist


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("recipe")
@click.argument("overrides", nargs=-1)
@click.option(
    "--trust-pickle",
    is_flag=True,
    help="Read the pickles in a checkpoint of Hugging Face's Trainer, if checkpoint.resume names "
    "one: tensors and plain values, nothing else.",
)
def train(recipe: str, overrides: tuple[str, ...], trust_pickle: bool) -> None:
    """Train as RECIPE says, a YAML file or the folder of a run.

    OVERRIDES are dotted fields such as optim.adamw.learning_rate=5e-5.

    RECIPE can also be a YAML or JSON file of LLaMA-Factory, with OVERRIDES such as
    learning_rate=5e-5; or its arguments take the place of both: --stage sft --do_train True ...

    If train.output_dir contains a checkpoint, training resumes from the latest one that passes
    verification. On Ctrl-C, SIGTERM, SIGHUP (the terminal was closed) or SIGUSR1 it finishes the
    step, saves, and exits with 128 + the signal's number. It exits with 3 if it has ended, but
    has skipped steps, as train.on_nan allows.
    """
    loaded, translation = _load((recipe, *overrides))  # errors come before the slow imports
    after = None if translation is None else translation.after
    if after is not None and after.with_generate:
        comparison()  # which fails before training if it would fail afterwards
    start_ranks(loaded.parallel)
    if translation is not None and os.environ.get("RANK", "0") == "0":
        for line in translation.notes():
            click.echo(visible(line), err=True)
    if translation is not None and after is not None and not translation.trains:
        evaluate_after(loaded, after, model="base")
        return
    with loading():
        from surefoot.run.training_run import run

        for name in loaded.method.packages:
            importlib.import_module(name)

    outcome = run(loaded, trust_pickle=trust_pickle, choose=_choice(loaded))
    if outcome.is_main:
        with contextlib.suppress(OSError):  # the terminal may be closed
            click.echo("\n".join(_ending(loaded, outcome)), err=True)
    if outcome.signal is not None:
        raise SystemExit(128 + outcome.signal)
    if after is not None:
        _evaluate(loaded, after)
    if outcome.state.num_skipped:
        raise SystemExit(SKIPPED_STEPS)


def _evaluate(recipe: Recipe, after: AfterTraining) -> None:
    """The evaluations that LLaMA-Factory's arguments ask for after training."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if os.environ.get("RANK", "0") == "0":
            asked = ", ".join(f"do_{part}" for part in after.parts)
            click.echo(f"{asked}: run `surefoot eval` on the same file", err=True)
        return
    evaluate_after(recipe, after, model=None)


def _load(words: tuple[str, ...]) -> tuple[Recipe, Translation | None]:
    """The recipe, and where LLaMA-Factory's arguments are it, what they are translated to."""
    with loading():
        from surefoot.recipe.from_llamafactory.opening import find_translation
        from surefoot.recipe.recipe import load, load_translation

    if (found := find_translation(words)) is None:
        _refuse_checkpoint(Path(words[0]))
        return load(Path(words[0]), words[1:]), None
    translation, overrides = found
    translation.check_trains()
    return load_translation(translation, overrides), translation


def _choice(recipe: Recipe) -> SizeChoice:
    """What finds the number that ``train.micro_batch_size: auto`` is."""
    if recipe.train.micro_batch_size != "auto":
        from surefoot.run.folder import no_choice

        return no_choice
    from surefoot.forecast.fitting import choose_micro_batch_size

    return choose_micro_batch_size


def _ending(recipe: Recipe, outcome: Outcome) -> Iterator[str]:
    """What a run has come to, and what to type next."""
    state = outcome.state
    if outcome.signal is not None and not state.is_complete:
        yield (
            f"stopped at step {state.global_step} by {outcome.signal.name}, saved; run the same "
            "command to resume"
        )
        return
    yield _length(state)
    if state.best_global_step is not None:
        metric = recipe.train.metric_for_best_model
        yield f"best: step {state.best_global_step}, {metric} {state.best_metric:.4g}"
    if count := state.num_skipped:
        what = counted(count, "step or batch", "steps or batches")
        yield f"skipped: {what} whose loss or gradient was NaN or infinite"
    place, folder = str(recipe.train.output_dir), recipe.train.folder
    files = [f"checkpoint-{state.global_step}", *_WRITTEN]
    yield f"{place}: {', '.join(name for name in files if (folder / name).exists())}"
    quoted = shlex.quote(place)
    scored = f"predict {quoted} --prompts FILE --output FILE"
    yield f"next: surefoot {scored if recipe.stage.spec.is_reward else f'chat {quoted}'}"
    yield f"      surefoot export {quoted} NEW_FOLDER"


def _length(state: TrainerState) -> str:
    """Steps, time, tokens and the last loss, in one line."""
    from ..terminal_text import duration

    parts = [f"{counted(state.global_step, 'step')} in {duration(state.train_runtime)}"]
    parts.append(f"{state.num_input_tokens_seen:,} tokens")
    losses = [record["loss"] for record in state.log_history if "loss" in record]
    return "trained: " + ", ".join(parts + [f"loss {value:.4f}" for value in losses[-1:]])


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
