"""From a recipe to a trained model, in reading order."""

from __future__ import annotations

import json
import logging
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any, TypeAlias

from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from .. import schema
from ..checkpoint.fetching import is_outline
from ..checkpoint.remote import stores
from ..checkpoint.verification import verify_checkpoint
from ..errors import CheckpointError, DamagedFileError, RecipeError, RunError, similar
from ..model.loading import device
from ..model.section import ModelSection
from ..parallel.progress import UPLOADING
from ..parallel.watchdog import watched
from ..parallel.world import World, explain_peer_loss, joined
from ..recipe.recipe import Recipe, dump, load, read, read_object
from ..recipe.recipe_data import find_base, settled, with_batch_sizes
from ..storage.files import is_folder, raising, read_json, write_aside
from ..storage.memory import allocator_message, is_out_of_memory
from ..storage.remote import Address
from ..training.callback import Record, TrainerCallback, TrainerState, all_made
from ..training.callbacks.metric_files import METRICS, restore
from ..training.evaluation import EVALUATION, check_metric, first_window, speeds
from ..training.restoring import readable
from ..training.restoring import restore as load_stored
from ..training.section import TrainSection
from ..training.trainer import Trainer
from ..training.views import Shown
from ._launch import recorded
from .apart import DamagedStartError, start_of
from .assembly import build as build  # noqa: PLC0414 - part of what a run is, from Python
from .card import write_card
from .code_files import try_rewards
from .folder import (
    MemoryChoice,
    RunFolder,
    begun,
    no_choice,
    opened,
    settings_of_launches,
    uploads_of,
    with_chosen_settings,
    write_recipe,
)
from .foreign_resume import refuse_output_dir
from .from_python import AS_IN_THE_RECIPE, Given, Rows, StageParts
from .new_weights import with_new_weights
from .parts import Start
from .resolving import resolved
from .trainer_names import argument_values

logger = logging.getLogger(__name__)
RESULTS = "all_results.json"
_ARGUMENTS = ("train_dataset", "eval_dataset", "tokenizer", "callbacks", "trust_pickle", "parts")
AnyRecipe: TypeAlias = "Recipe | str | Path | Mapping[str, object] | object"
AnyModel: TypeAlias = (
    "nn.Module | PretrainedConfig | str | Path | Mapping[str, object] | ModelSection | None"
)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its state, the trained model, and the signal that stopped it, if one did.

    The model is ready to ``generate``. On several ranks, it is this rank's shards.
    """

    state: TrainerState
    model: nn.Module = field(repr=False)  # with its adapter, in evaluation mode
    tokenizer: PreTrainedTokenizerBase = field(repr=False)  # with the chat template of the run
    output_dir: Path
    signal: Signals | None = None
    is_main: bool = True  # whether this is the rank that speaks for all

    @property
    def global_step(self) -> int:
        """Optimizer steps of the run."""
        return self.state.global_step

    @property
    def log_history(self) -> list[Record]:
        """All logs and evaluations."""
        return self.state.log_history

    @property
    def best_metric(self) -> float | None:
        """The value of ``train.metric_for_best_model`` at ``best_global_step``."""
        return self.state.best_metric

    @property
    def best_global_step(self) -> int | None:
        """The step of the best checkpoint."""
        return self.state.best_global_step


class LoopFollower(TrainerCallback):
    """A callback that gets the loop, too."""

    @abstractmethod
    def follow(self, loop: Trainer) -> None:
        """The loop is built and, on a resume, its states are restored."""


def train(
    recipe: AnyRecipe,
    *,
    callbacks: object = (),
    trust_pickle: bool = False,
    train_dataset: Rows | None = None,
    eval_dataset: Rows | Mapping[str, Rows] | None = None,
    model: AnyModel = None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    parts: StageParts = AS_IN_THE_RECIPE,
    **overrides: object,
) -> Outcome:
    """Train the recipe, resuming from its output_dir; returns the trained model and its state. It
    is what ``train`` of a ``surefoot.Trainer`` does that is made of the same.

    Args:
        recipe: a ``Recipe``, the path of a YAML file, the same as nested mappings, or the
            ``TrainingArguments`` of transformers.
        callbacks: objects or classes in addition to those of the recipe, a list or one.
        trust_pickle: read the pickles in a checkpoint of Hugging Face's Trainer, if
            ``checkpoint.resume`` names one.
        train_dataset: rows in place of ``data.datasets``: a ``datasets.Dataset``, a DataFrame,
            mappings, or one mapping of columns to lists.
        eval_dataset: rows in place of ``data.eval_datasets``, or several such by name.
        model: a transformers model, of which a copy is trained, whose weights it gets at the end if
            they fit; a configuration of one, which gets new weights; a folder or hub id; or the
            section of that name.
        tokenizer: in place of the model's own; or its folder or hub id.
        parts: a loss, a collation or metrics in place of the stage's.
        overrides: sections to change, as nested mappings
            (``optim={"adamw": {"learning_rate": 5e-5}}``) or as dotted paths
            (``**{"optim.adamw.learning_rate": 5e-5}``); a stage, method or optimizer may be an
            instance of a class of your own.

    Raises:
        SurefootError: whatever a user can fix; see ``errors``.
    """
    rows = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
    loaded, objects = read_given(recipe, model, overrides, tokenizer=tokenizer, **rows)
    loaded = objects.stored(loaded)
    outcome = run(loaded, callbacks=callbacks, trust_pickle=trust_pickle, parts=parts)
    objects.fill(outcome.model, loaded)
    return outcome


def run(
    recipe: Recipe,
    *,
    callbacks: object = (),
    trust_pickle: bool = False,
    parts: StageParts = AS_IN_THE_RECIPE,
    choose: MemoryChoice = no_choice,
    command: str | None = None,
    began: float | None = None,
) -> Outcome:
    """Start or resume a run; see ``train``. ``choose`` finds what
    ``train.micro_batch_size`` and ``model.gradient_checkpointing`` are if they are auto.
    ``command`` stands in the record of the launch; by default it is that of this process, which
    says nothing in a worker of a cluster. ``began`` is when the launch did, in seconds since 1970,
    if that was before this call."""
    began = time.time() if began is None else began
    callbacks = all_made(callbacks)  # what is none is an error before all else
    if not isinstance(parts, StageParts):
        raise RecipeError(f"parts: expected a surefoot.StageParts, got a {type(parts).__name__}")
    with (
        joined(recipe.parallel) as joined_world,
        watched(joined_world, recipe.parallel, recipe.train.folder) as world,
    ):
        recipe, note = with_batch_sizes(recipe, world.num_data_ranks)
        if note is not None:
            logger.info("%s", note)
        arguments_of(recipe)  # a name that stands there twice is an error before all else
        # So is a function that is not there.
        world.on_main(lambda: try_rewards(recipe.stage, recipe.data, recipe))
        recipe = located(recipe, world)
        order = _Order(
            callbacks=callbacks,
            trust_pickle=trust_pickle,
            parts=parts,
            choose=choose,
            command=command,
            began=began,
        )
        outcome = _run(recipe, world, order)
        # srun --kill-on-bad-exit and torchrun end all ranks when one exits with 143, as after a
        # signal all do: rank 0 may still have to commit, or to upload.
        world.wait()
        return outcome


def resumed_from(recipe: Recipe, checkpoint: str) -> Recipe:
    """``recipe``, whose run is resumed from ``checkpoint``."""
    return replace(recipe, checkpoint=replace(recipe.checkpoint, resume=checkpoint))


def arguments_of(recipe: Recipe) -> dict[str, Shown]:
    """Its settings under the names of the Hugging Face Trainer, before the run."""
    return argument_values(recipe.model, recipe.train, recipe.optim, recipe.checkpoint)


def located(recipe: Recipe, world: World) -> Recipe:
    """The recipe with the settings that its model has, which may be downloaded for it."""
    with world.main_first():
        recipe = resolved(recipe)
        saves_base = recipe.method.saves_base_model
        model = with_new_weights(recipe.model, recipe.train, saves_base=saves_base)
        recipe = replace(recipe, model=model)
        return settled(recipe, find_base(recipe, weights=False))


@dataclass(frozen=True, kw_only=True)
class _Order:
    """How a run is launched, beside its recipe: what ``run`` was given."""

    callbacks: Sequence[object]
    trust_pickle: bool
    parts: StageParts
    choose: MemoryChoice
    command: str | None
    began: float


def _run(recipe: Recipe, world: World, order: _Order) -> Outcome:
    with opened(recipe, world) as folder:
        world = replace(world, is_apart=folder.is_apart)
        is_chosen = not recipe.is_fitted
        recipe = with_chosen_settings(recipe, folder, world, order.choose)
        while True:
            try:
                return _launched(recipe, folder, world, order, is_chosen=is_chosen)
            except DamagedStartError as error:
                logger.warning("checkpoint-%d is skipped: %s", error.step, error)
                if folder.away is not None:
                    folder.away.give_up(error.step)


def _launched(
    recipe: Recipe, folder: RunFolder, world: World, order: _Order, *, is_chosen: bool
) -> Outcome:
    """Train from the latest checkpoint on. Raises ``DamagedStartError`` if another one is to be
    looked for."""
    start = mirror = apart = None
    if world.is_main:
        refuse_output_dir(folder.path)
        start, mirror = begun(folder, recipe.checkpoint, recipe.train)
        apart = folder.away.apart() if folder.away and folder.is_apart else None
    start, apart = world.from_main((start, apart))
    if apart is not None:
        apart = replace(apart, folder=str(folder.path.absolute()))  # it was rank 0's
        start = start_of(start, apart, world)
    settings = schema.write(recipe)
    record = partial(recorded, command=order.command, began=order.began)
    with record(folder.path, recipe.train, settings, world, start) as launch:
        uploads = uploads_of(recipe.train) if world.is_main else None
        others = () if uploads is None else (uploads,)
        trainer = build(
            recipe,
            callbacks=(*order.callbacks, *launch.callbacks, *others),
            resume=start
            and Start.of(start, world, trust_pickle=order.trust_pickle, is_verified=True),
            world=world,
            listeners=() if mirror is None else (mirror,),
            stage_parts=order.parts,
            apart=apart,
        )
        launch.follow(trainer, settings_of_launches(recipe))
        for each in order.callbacks:
            if isinstance(each, LoopFollower):
                each.follow(trainer)
        tries_heaviest = is_chosen and start is None and device().type == "cuda"
        with ExitStack() as if_it_fails:
            # It holds the folder open: a disk on which nothing could be written stays busy.
            if_it_fails.callback(trainer.saver.close)
            if world.is_main:
                write_recipe(folder, dump(recipe))
                if start is not None:  # a smaller keep makes room before a save
                    trainer.saver.delete_old(**trainer.ranking)
            if_it_fails.pop_all()
        with mirror or nullcontext(), uploads or nullcontext(), launch.before_uploads():
            outcome = _fit(trainer, tries_heaviest=tries_heaviest)
            launch.ended(outcome.state, outcome.signal)
            world.progress.enter(UPLOADING)  # also at the end of the blocks
            if uploads is not None:
                uploads.finish(is_complete=trainer.state.is_complete)
            return outcome


def _fit(trainer: Trainer, *, tries_heaviest: bool = False) -> Outcome:
    state = trainer.state
    if trainer.world.from_main(_is_finished(trainer)):
        counts = f"{state.global_step:,} of {state.max_steps:,} steps"
        if state.global_step > state.max_steps:
            counts = f"it has {state.global_step:,} steps, and is to have {state.max_steps:,} now"
        logger.info(
            "this run is complete: %s. To train longer, raise train.num_epochs or train.max_steps",
            counts,
        )
        if trainer.world.is_main:
            restore(trainer.section.folder / METRICS, state.log_history)
        _load_best(trainer)
        trainer.saver.close()
        return outcome_of(trainer)
    newest, last = trainer.saver.newest, trainer.saver.path_of(state.global_step)
    if state.is_complete and state.global_step and newest != last:
        raise RunError(
            f"checkpoint.resume: the checkpoint is of step {state.global_step:,}, and this run is "
            f"to end at step {state.max_steps:,}, so there is nothing to train; raise "
            "train.max_steps (or train.num_epochs)"
        )
    if state.is_complete:
        logger.info("the last step is saved, but the run was ended before its results were written")
    explain_rank_loss = explain_peer_loss(trainer.world.rank, lambda: trainer.signal)
    # also after the last step: a signal lets the last upload finish
    with trainer.stop, explain_rank_loss, explain_out_of_memory(trainer):
        if tries_heaviest:
            trainer.try_heaviest()
        _must_have_metric(trainer)
        trainer.fit()
        _must_be_saved(trainer)
        finish(trainer)
        trainer.world.progress.enter(UPLOADING)
        trainer.saver.finish(**trainer.ranking)
    return outcome_of(trainer)


def outcome_of(trainer: Trainer) -> Outcome:
    """The model of a run that has ended, ready to generate."""
    codec = trainer.evaluation.context((EVALUATION, 0)).codec
    return Outcome(
        trainer.state,
        trainer.policy.module.eval(),
        codec.tokenizer,
        trainer.section.folder,
        trainer.signal,
        trainer.world.is_main,
    )


@contextmanager
def explain_out_of_memory(trainer: Trainer) -> Iterator[None]:
    """Convert a failed allocation of the loop to a ``RunError``. No checkpoint is lost by it: the
    save in flight has its own copy, and has ended when the loop has."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        newest = trainer.saver.newest or "no checkpoint has been saved yet"
        raise RunError(
            f"train.micro_batch_size: step {trainer.state.global_step + 1} ran out of memory "
            f"({allocator_message(error)}). Latest checkpoint: {newest}. Lower "
            "train.micro_batch_size or set model.gradient_checkpointing: true, then run the same "
            "command to resume; `surefoot plan` estimates the memory that a recipe needs"
        ) from error


def _is_finished(trainer: Trainer) -> bool:
    """Whether the run has taken its last step, and nothing after it was interrupted."""
    if not trainer.state.is_complete:
        return False
    try:
        # A run that was killed between its last save and here never got its results: the state
        # alone does not say that it ended. The next launch writes what is missing
        # (docs/decisions/0043).
        results = read_json(trainer.section.folder / RESULTS)
    except (OSError, ValueError):
        return False
    return isinstance(results, dict) and results.get("global_step") == trainer.state.global_step


def _must_have_metric(trainer: Trainer) -> None:
    """Raise ``RunError`` before the first step if evaluations would have no
    ``metric_for_best_model``: an evaluation of one window has all names, also those of a loss of
    the user's own. A stage that samples would take long for it, and has its own names."""
    section, evaluation = trainer.section, trainer.evaluation
    is_used = section.eval_steps or section.eval_minutes or section.eval_epoch
    is_sure = section.metric_for_best_model == "eval_loss" or trainer.stage.max_new_tokens
    name, log = section.metric_for_best_model, trainer.state.log_history
    if trainer.evals and is_used and not is_sure and not any(name in record for record in log):
        sets = {n: first_window(x, evaluation.window_size) for n, x in trainer.evals.items()}
        check_metric(name, trainer.measure(sets, "eval"))


def _must_be_saved(trainer: Trainer) -> None:
    """Raise an error if the last save failed (``on_save_error: continue``)."""
    step, newest = trainer.state.global_step, trainer.saver.newest
    ended = step >= trainer.state.max_steps or trainer.signal is not None
    if ended and newest != trainer.saver.path_of(step):
        raise CheckpointError(
            f"step {step}, the last one, could not be saved; the latest checkpoint is "
            f"{newest or 'none'}. Free some space, then start the same command again to resume "
            "from it"
        )


def read_given(
    recipe: AnyRecipe, model: AnyModel, overrides: Mapping[str, object], **objects: Any
) -> tuple[Recipe, Given]:
    """The recipe to run, and the objects that a program gives in place of names in it."""
    for name in overrides.keys() - {section.name for section in fields(Recipe)}:
        if close := similar(name, _ARGUMENTS, cutoff=0.8):
            raise RecipeError(f"{name}: no such argument; did you mean {close[0]}?")
    if isinstance(model, str | Path):
        overrides, model = {"model.path": str(model), **overrides}, None
    if model is not None and not isinstance(model, nn.Module | PretrainedConfig):
        overrides, model = {"model": model, **overrides}, None
    given = Given(model=model, **objects)
    return read_recipe(recipe, given.overrides(overrides)), given


def read_recipe(recipe: AnyRecipe, overrides: Mapping[str, object]) -> Recipe:
    """The recipe to run, from any of its forms."""
    if isinstance(recipe, Recipe):
        return read(recipe, overrides) if overrides else recipe
    if isinstance(recipe, Mapping):
        return read(recipe, overrides)
    if isinstance(recipe, str | Path):
        return load(Path(recipe), overrides)
    return read_object(recipe, overrides)


def finish(trainer: Trainer) -> None:
    """Write ``all_results.json`` and the model card; load the best weights if the recipe says
    so."""
    state, section = trainer.state, trainer.section
    if trainer.signal is not None and not state.is_complete:
        return
    best = _load_best(trainer)
    if not trainer.world.is_main:
        return
    steps = max(1, state.global_step - state.num_skipped_steps)
    evaluations = [record for record in state.log_history if "eval_loss" in record]
    results: dict[str, object] = {
        "global_step": state.global_step,
        "epoch": state.epoch,
        "train_loss": state.train_loss_total / steps,
        **speeds("train", state.train_runtime, _counts(trainer)),
        "save_blocking_seconds": trainer.saver.blocking_seconds,
        "num_input_tokens_seen": state.num_input_tokens_seen,
        "total_flos": state.total_flos,
        "num_skipped_steps": state.num_skipped_steps,
        "best_metric": state.best_metric,
        "best_global_step": best,
        **(evaluations[-1] if evaluations else {}),
    }
    results.pop("step", None)
    text = json.dumps(results, indent=2, sort_keys=True) + "\n"
    with raising(RunError, "results"):
        write_aside(section.folder / RESULTS, text.encode())
    best = best if section.load_best_model_at_end else None
    checkpoint = trainer.saver.path_of(state.global_step if best is None else best)
    if checkpoint.is_dir():
        write_card(section.folder, checkpoint, inside=checkpoint.name)


def _counts(trainer: Trainer) -> dict[str, int]:
    """What a run has trained on."""
    state, args = trainer.state, trainer.callbacks.args
    samples = state.global_step * trainer.section.global_batch_size
    if args.num_examples is not None and args.steps_per_epoch is not None:
        # The last window of an epoch may be smaller.
        windows = round(state.epoch * args.steps_per_epoch)
        epochs, rest = divmod(windows, args.steps_per_epoch)
        samples = epochs * args.num_examples + rest * trainer.section.global_batch_size
    return {
        "samples": samples,
        "steps": state.global_step,
        "tokens": state.num_input_tokens_seen,
    }


def _load_best(trainer: Trainer) -> int | None:
    """Load the best weights on all ranks if the recipe says so; the step of the best
    checkpoint. A collective call."""
    state, section = trainer.state, trainer.section
    best = state.best_global_step
    if not section.load_best_model_at_end or best is None:
        return best
    weights, world = ["model", *trainer.policy.network.head_weights], trainer.world
    problem = None
    try:
        folder = readable(trainer.saver, trainer.saver.path_of(best), world)
        if not is_outline(folder):
            folder, problem = world.on_main(partial(_verified, folder, section))
        if problem is None:
            load_stored(folder, trainer.states, world, only=weights, is_verified=True)
    except DamagedFileError as error:
        problem = str(error)
    if problem is not None:
        if trainer.world.is_main:
            why = "the run ends with its last weights, not with the best ones: %s"
            logger.warning(why, problem)
        return None
    logger.info(
        "best: checkpoint-%d, %s %.4g", best, section.metric_for_best_model, state.best_metric
    )
    return best


def _verified(folder: Path, section: TrainSection) -> tuple[Path, str | None]:
    """The folder of a checkpoint, downloaded if it is only in a store, and what is wrong with it,
    before anything of it is read into place."""
    if not is_folder(folder) and isinstance(section.output_dir, Address):
        folder = stores().fetch(section.output_dir.inside(folder.name), section.cache_dir)
    report = verify_checkpoint(folder, full=True)
    return folder, None if report.ok else report.problems[0]
