"""``surefoot train``: from a recipe to tuned weights; the same command resumes."""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import SKIPPED_STEPS, RunError, counted
from ..parallel.section import launched
from ..terminal_text import visible
from .loading import loading, start_ranks
from .targets import ReadingCommand

if TYPE_CHECKING:
    from ..recipe.recipe import ConvertedFile, Recipe
    from ..run.folder import MemoryChoice
    from ..run.training_run import Outcome
    from ..training.callback import TrainerState

RESULTS = "all_results.json"
_WRITTEN = ("metrics.jsonl", "loss.png", RESULTS)  # as far as they exist
_OF_TRAINING = ("epoch", "num_input_tokens_seen", "total_flos")  # in the table beside train_...


@click.command(cls=ReadingCommand, context_settings={"ignore_unknown_options": True})
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

    RECIPE can also be a YAML or JSON file of LLaMA-Factory, TRL or axolotl, which is converted and
    shown first. LLaMA-Factory's arguments can be OVERRIDES, such as learning_rate=5e-5, or take the
    place of both: --stage sft --do_train True ... So can those of MindSpore Transformers'
    run_mindformer.py: --config FILE --run_mode finetune --load_checkpoint DIR ...

    If train.output_dir contains a checkpoint, training resumes from the latest one that passes
    verification. On Ctrl-C, SIGTERM, SIGHUP (the terminal was closed), SIGUSR1, SIGUSR2 or SIGXCPU
    it finishes the step, saves, and exits with 128 + the signal's number. It exits with 3 if it has
    ended, but has skipped steps, as train.on_nan allows, and with 40 if a rank hangs
    (parallel.timeout).
    """
    words = (recipe, *overrides)
    loaded, converted = _load(words)  # errors come before the slow imports
    more = _trainer_resume(loaded, trust_pickle=trust_pickle)
    loaded, converted = _load((*words, *more)) if more else (loaded, converted)
    trust_pickle = trust_pickle or bool(more)
    extras = converted.extras
    extras.check()
    retyped = [*more, "--trust-pickle"] if more else ()
    modules = ("surefoot.run.training_run", *loaded.method.packages)
    start_ranks(loaded.parallel, modules, retyped, partial(_check_ranks, loaded))
    is_main = (launched(os.environ) or (0,))[0] == 0
    for line in _shown(converted) if is_main else ():
        click.echo(visible(line), err=True)
    if not extras.trains:
        extras.evaluate(loaded, "base")
        return
    with loading():
        from surefoot.run.training_run import run
        from surefoot.training.callbacks.launches import process_began

        for name in loaded.method.packages:
            importlib.import_module(name)

    choose, began = _choice(loaded), process_began()
    callbacks = extras.callbacks(loaded) if is_main else ()
    outcome = run(
        loaded, callbacks=callbacks, trust_pickle=trust_pickle, choose=choose, began=began
    )
    if is_main and outcome.state.is_complete:
        extras.finish(loaded, outcome.state)
    if outcome.is_main:
        with contextlib.suppress(OSError):  # the terminal may be closed
            click.echo("\n".join(_ending(loaded, outcome)), err=True)
    if outcome.signal is not None:
        raise SystemExit(128 + outcome.signal)
    extras.after_run(loaded)
    if outcome.state.num_skipped:
        # Neither a success that a script should build upon unread, nor an error that the same
        # command would mend (docs/decisions/0043).
        raise SystemExit(SKIPPED_STEPS)


def _shown(converted: ConvertedFile) -> Iterator[str]:
    """The recipe that another program's file has become, and what is to be known of it."""
    yield from converted.notes
    if converted.document.data is not None:
        from ..recipe.yaml import emit

        yield from (f"  | {line}" for line in emit(converted.document.data).splitlines())


def _check_ranks(recipe: Recipe, count: int) -> None:
    """Raises what every one of ``count`` ranks would raise of the mesh and the batch sizes, once
    it has imported everything."""
    from ..data.order.micro_batches import check_divides
    from ..recipe.recipe_data import with_batch_sizes

    try:
        ranks = recipe.parallel.num_data_ranks(count)
    except ValueError as error:
        raise RunError(f"parallel: {error}; set parallel.num_processes to as many") from None
    train = with_batch_sizes(recipe, ranks)[0].train
    if isinstance(train.micro_batch_size, int):
        check_divides(train.global_batch_size, train.micro_batch_size, ranks)


def _load(words: tuple[str, ...]) -> tuple[Recipe, ConvertedFile]:
    """The recipe, and what it was converted from; of a recipe, a conversion of nothing."""
    with loading():
        from surefoot.recipe.recipe import ConvertedFile, convert, load, load_converted
        from surefoot.recipe.yaml import Document

    if (converted := convert(words)) is not None:
        return load_converted(converted), converted
    _refuse_checkpoint(Path(words[0]))
    return load(Path(words[0]), words[1:]), ConvertedFile("", Document(None))


def _trainer_resume(recipe: Recipe, *, trust_pickle: bool) -> list[str]:
    """Overrides that resume a run of another trainer, which is in ``train.output_dir``: in a folder
    beside it, after one question about its pickles. Empty if
    there is none. Raises ``RunError``: there is no terminal, or the answer is no."""
    from ..checkpoint.disk.commit import committed, named

    place = recipe.train.output_dir
    if not isinstance(place, Path) or recipe.checkpoint.resume == "none" or not named(place):
        return []
    with loading():
        from ..run.foreign_resume import latest_foreign

    if (foreign_run := latest_foreign(place)) is None:
        return []
    trainer, latest = foreign_run
    resume = recipe.checkpoint.resume
    start = latest if resume == "auto" else Path(resume)
    beside = place.with_name(f"{place.name}-surefoot")
    if not trust_pickle and not list(committed(beside)):
        text = (
            f"{place} contains {start.name} of {trainer.title}, which is resumed in "
            f"{beside}. Its {', '.join(trainer.pickles_in(start))} are pickles: tensors and plain "
            "values are read, and nothing is executed"
        )
        if launched(os.environ) or not sys.stdin.isatty():
            raise RunError(f"train.output_dir: {text}; if you trust them, add --trust-pickle")
        if not click.confirm(f"{text}. Resume?", err=True):
            raise RunError("not resumed; choose another train.output_dir to start from scratch")
    if (launched(os.environ) or (0,))[0] == 0:
        click.echo(f"{place} is a run of {trainer.title}: resuming in {beside}", err=True)
    return [f"train.output_dir={beside}", f"checkpoint.resume={start}"]


def _choice(recipe: Recipe) -> MemoryChoice:
    """What finds the settings that are auto, by the memory that is free."""
    if recipe.is_fitted:
        from surefoot.run.folder import no_choice

        return no_choice
    from surefoot.use.estimate.plan import choose_settings

    return choose_settings


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
    yield from _tables(folder / RESULTS)
    yield f"next: surefoot {scored if recipe.stage.spec.gives_scores else f'chat {quoted}'}"
    yield f"      surefoot export {quoted} NEW_FOLDER"


def _tables(path: Path) -> Iterator[str]:
    """The metrics of training and of the last evaluation, by their names in ``path``."""
    from ..storage.files import read_json

    results = read_json(path)
    assert isinstance(results, dict)  # which this run has written
    for part in ("train", "eval"):
        names = [name for name in sorted(results) if name.startswith(f"{part}_")]
        if not names:
            return
        yield f"{part} metrics:"
        for name in (*(_OF_TRAINING if part == "train" else ()), *names):
            value = results[name]
            text = f"{value:,.5g}" if isinstance(value, float) else f"{value:,}"
            yield f"  {name:<28}{text:>12}"


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
