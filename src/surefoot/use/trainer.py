"""``surefoot.Trainer``: a run as an object with the methods of the Hugging Face Trainer.

It is made of a recipe and of what a program has in memory, and holds the loop of its run: that of
``train``, or one that is never started, to measure the model before. Nothing in it is to be
overridden: what people override there is another part of a run here, which ``INSTEAD`` names.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase

from ..checkpoint.disk.commit import new_folder
from ..checkpoint.saving.preparation import save
from ..checkpoint.state.roles import MODEL
from ..data.text.prompts import read_prompts
from ..errors import CheckpointError, DataError, RecipeError, RunError
from ..model.loading import device
from ..model.numerics import autocast
from ..parallel.section import launched
from ..parallel.world import ALONE
from ..recipe.recipe_data import with_batch_sizes
from ..run.assembly import build
from ..run.from_python import AS_IN_THE_RECIPE, Rows, StageParts, by_name, write_rows
from ..run.training_run import (
    AnyModel,
    AnyRecipe,
    LoopFollower,
    Outcome,
    arguments_of,
    located,
    read_given,
    resumed_from,
    run,
)
from ..storage import files
from ..training import Screen
from ..training.arguments import Arguments, Context
from ..training.callback import TrainerControl, TrainerState, all_made, chosen, made
from ..training.evaluation import EVALUATION, EvaluationSet
from ..training.precompute import NOTHING
from ..training.stage import auxiliary_models
from ..training.trainer import Trainer as Loop
from .conversation import Answer
from .evaluation import encoded
from .model_loading import LoadedModel
from .prediction import has_response, predict, read_rows_of

logger = logging.getLogger(__name__)
_MEASURED = "rows"  # the name of a dataset that is given to be measured
_PRINTERS = {"PrinterCallback", "ProgressCallback", "NotebookProgressCallback"}  # of transformers

# What stands in place of a method, or of an argument of the constructor, of the Hugging Face
# Trainer (docs/how-to/from-the-trainer.md).
_BY_CURE = {
    "a loss of your own, parts=surefoot.StageParts(loss=...)": "compute_loss compute_loss_func "
    "label_smoother compute_loss_context_manager",
    "metrics of your own, parts=surefoot.StageParts(metrics=...)": "compute_metrics "
    "preprocess_logits_for_metrics prediction_step evaluation_loop prediction_loop",
    "batches of your own, parts=surefoot.StageParts(collate=...)": "data_collator "
    "get_train_dataloader get_eval_dataloader get_test_dataloader _prepare_inputs "
    "_remove_unused_columns",
    "the settings of data, such as data={'shuffle': False}": "_get_train_sampler "
    "_get_eval_sampler formatting_func",
    "an instance of a class of your own, optim=...": "create_optimizer optimizers "
    "create_optimizer_and_scheduler get_optimizer_cls_and_kwargs optimizer_cls_and_kwargs "
    "get_decay_parameter_names",
    "optim={NAME: {'schedule': ...}}": "create_scheduler",
    "a stage of your own, stage=...": "training_step get_batch_samples num_items_in_batch",
    "a callback with on_step_end and its control": "_maybe_log_save_evaluate _inner_training_loop",
    "a callback with on_log": "log",
    "a callback with on_save, whose files in the checkpoint stay": "_save _save_checkpoint "
    "save_state _save_optimizer_and_scheduler _save_rng_state _rotate_checkpoints",
    "checkpoint.resume and train.load_best_model_at_end": "_load_from_checkpoint _load_best_model",
    "method={'lora': {'rank': ...}}": "peft_config",
    "model=..., a configuration for new weights": "model_init",
    "the settings of model, parallel and train.precision": "_wrap_model "
    "autocast_smart_context_manager create_accelerator_and_postprocess",
    "all_results.json in the folder of the run": "log_metrics save_metrics",
    "state of this object, such as state.is_world_process_zero": "is_world_process_zero "
    "is_local_process_zero",
    "train={'push_to_hub': ...}, or `surefoot push`": "push_to_hub create_model_card init_hf_repo",
    "`surefoot sweep`": "hyperparameter_search",
}
INSTEAD = {name: cure for cure, names in _BY_CURE.items() for name in names.split()}


@dataclass(frozen=True)
class Predictions:
    """The responses to rows, in their order, and the metrics of those that have one already."""

    answers: list[Answer]
    metrics: dict[str, float]

    @property
    def predictions(self) -> list[str]:
        """The texts of the responses."""
        return [answer.text for answer in self.answers]


class RunTrainer:
    """A run of a recipe; see ``surefoot.train`` for what it is made of."""

    def __init_subclass__(cls) -> None:
        """Raises ``RecipeError`` for a method that nothing would call."""
        for name in INSTEAD.keys() & vars(cls).keys():
            raise RecipeError(f"{cls.__name__}.{name}: nothing calls it; use {INSTEAD[name]}")

    def __init__(
        self,
        recipe: AnyRecipe = None,
        *,
        model: AnyModel = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | Mapping[str, Rows] | None = None,
        processing_class: PreTrainedTokenizerBase | str | Path | None = None,
        callbacks: object = (),
        parts: StageParts = AS_IN_THE_RECIPE,
        **overrides: object,
    ) -> None:
        """Reads the recipe, and opens nothing yet. ``args`` and ``tokenizer`` are the Hugging Face
        Trainer's names of ``recipe`` and ``processing_class``."""
        for name in INSTEAD.keys() & overrides.keys():
            raise RecipeError(f"{name}: not taken; use {INSTEAD[name]}")
        recipe = overrides.pop("args", recipe)
        self._trusts = bool(overrides.pop("trust_pickle", False))
        tokenizer = overrides.pop("tokenizer", processing_class)
        rows = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        self._recipe, self._given = read_given(
            recipe, model, overrides, tokenizer=tokenizer, **rows
        )
        self._is_stored = self._is_training = False
        self._parts, self._without = parts, list[object]()
        self._callbacks = all_made(callbacks)
        self._args = Arguments(shown=arguments_of(self._recipe))
        self._loop: Loop | None = None

    def __getattr__(self, name: str) -> object:
        cure = f"; use {INSTEAD[name]}" if name in INSTEAD else ""
        raise AttributeError(f"surefoot.Trainer has no {name}{cure}")

    @property
    def args(self) -> Arguments:
        """The settings under the Trainer's names; a new name can be set, and callbacks read it."""
        return self._args

    @property
    def state(self) -> TrainerState:
        """The progress of the run; before it, none."""
        return TrainerState() if self._loop is None else self._loop.state

    @property
    def model(self) -> nn.Module:
        """The trained model, and before that the given object. Raises ``RunError``: none is."""
        if self._loop is not None:
            return self._loop.policy.module
        if not isinstance(self._given.model, nn.Module):
            raise RunError("model: it is opened by train(); give an object to look at it before")
        return self._given.model

    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> Outcome:
        """Start the run, or resume it from its latest checkpoint, or from the one that is named.
        A model that was given has the trained weights afterwards, if they fit."""
        self._store()
        recipe = self._recipe
        if resume_from_checkpoint not in (None, True):
            recipe = resumed_from(recipe, str(resume_from_checkpoint or "none"))
        # without the parts of a loop before, which would stay in memory
        self._args = Arguments(shown=arguments_of(recipe), added=self._args.added)
        self._loop, self._is_training = None, True
        members = [_Following(self), *self._callbacks]
        try:
            outcome = run(recipe, callbacks=members, trust_pickle=self._trusts, parts=self._parts)
        finally:
            self._is_training = False
        self._given.fill(outcome.model, recipe)
        return outcome

    def evaluate(
        self,
        eval_dataset: Rows | Mapping[str, Rows] | None = None,
        *,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """The metrics of evaluations, of the model as it is now, on the rows of the run or on
        others, in a callback, too. Nothing changes, and no callback counts it. Raises
        ``RunError``."""
        loop = self._ready("evaluate")
        sets = loop.evals
        if eval_dataset is not None:
            given = by_name(eval_dataset)
            one = len(given) == 1 and given is not eval_dataset
            sets = {
                "" if one else name: self._encoded(loop, self._file(loop, rows))
                for name, rows in given.items()
            }
        if not sets:
            raise RunError("evaluate: there are no rows; give eval_dataset=...")
        return loop.measure(sets, metric_key_prefix)

    def predict(self, test_dataset: Rows, *, metric_key_prefix: str = "test") -> Predictions:
        """The responses to rows, by the recipe's ``generate``, and metrics if they have responses
        already. Raises ``DataError`` and ``RunError``."""
        loop = self._ready("predict")
        path, network = self._file(loop, test_dataset), loop.policy.network
        codec = loop.evaluation.context((EVALUATION, 0)).codec
        prompts = read_prompts(path, codec.section)
        opened = LoadedModel(
            network,
            codec.tokenizer,
            codec.template,
            self._recipe,
            loop.section.folder,
            media=codec.media,
        )
        with autocast(network.options.precision, device()):
            answers = predict(opened, prompts, opened.generate, seed=loop.section.seed)
        metrics = dict[str, float]()
        if any(map(has_response, read_rows_of(path, codec.section))):
            metrics = loop.measure({"": self._encoded(loop, path)}, metric_key_prefix)
        loop.callbacks.emit("on_predict", metrics=metrics)
        return Predictions(answers, metrics)

    def save_model(self, output_dir: str | Path) -> None:
        """Write the weights as they are now, with tokenizer and configuration, to a new folder, as
        a checkpoint has them: an adapter by itself. Raises ``CheckpointError`` if it exists."""
        loop, target = self._ready("save_model"), Path(output_dir).absolute()
        if target == loop.section.folder.absolute():
            raise CheckpointError(
                f"{output_dir}: it is the folder of the run, whose checkpoints have the model; "
                "choose another folder"
            )
        if loop.world.size > 1:
            raise RunError("save_model: not on several ranks; `surefoot export` a checkpoint")
        saver, step = loop.saver, loop.state.global_step
        weights = {MODEL: loop.policy.network.weights}
        companions = dict(saver.companions)
        with new_folder(target, may_be_empty=True) as folder:
            saved = save(folder, step, weights, kind=saver.kind, companions=companions)
            for name in files.names_in(saved):
                files.rename(saved / name, folder / name)
            files.remove_tree(saved)
        logger.info("saved the model of step %d in %s", step, output_dir)

    def add_callback(self, callback: object) -> None:
        """Call it after the others, from now on. Raises ``RecipeError`` if it is none."""
        member = made(callback)
        self._callbacks.append(member)
        if self._loop is not None:
            self._loop.callbacks.add(member)

    def pop_callback(self, callback: object) -> object | None:
        """No longer call ``callback``, or the first of this class; returns it. The run's own, such
        as ``surefoot.training.Screen``, are there once it begins, and are removed then."""
        is_class = isinstance(callback, type)
        member = chosen(self._callbacks, callback)
        if member is not None:
            self._callbacks.remove(member)
            callback = member
        elif is_class and callback.__name__ in _PRINTERS:  # type: ignore[attr-defined]
            callback = Screen
        if member is None:
            self._without.append(callback)
        return member if self._loop is None else self._loop.callbacks.pop(callback)

    def remove_callback(self, callback: object) -> None:
        """The same, without returning it."""
        self.pop_callback(callback)

    def _store(self) -> None:
        """Write the given objects into the folder of the run, as its recipe then says."""
        if not self._is_stored:
            self._recipe, self._is_stored = self._given.stored(self._recipe), True

    def _ready(self, method: str) -> Loop:
        """The loop of the run; before ``train``, one that is not started."""
        if not self._is_training and (launched() or (0, 1, 0))[1] > 1:
            raise RunError(
                f"{method}: several ranks meet in train() alone; call it in a callback, or use "
                "`surefoot eval`, `predict` and `export` on the run"
            )
        if self._loop is None:
            self._store()
            recipe, _ = with_batch_sizes(self._recipe, 1)
            self._loop = build(located(recipe, ALONE), stage_parts=self._parts)
            self._loop.saver.close()  # it holds the folder open
        return self._loop

    def _file(self, loop: Loop, rows: Rows) -> Path:
        """A file of rows, in the folder of the run."""
        folder = write_rows({_MEASURED: rows}, loop.section.folder)
        return folder / f"{_MEASURED}.jsonl"

    def _encoded(self, loop: Loop, path: Path) -> EvaluationSet:
        """The rows of a file with responses, as the stage reads them."""
        stage, codec = loop.stage, loop.evaluation.context((EVALUATION, 0)).codec
        if auxiliary_models(stage, "ahead"):
            raise RunError(
                "the stage compares each row with another model, which is read before the first "
                "step; give the rows as eval_dataset of the Trainer"
            )
        examples = [e for e in read_rows_of(path, codec.section) if has_response(e)]
        if not examples:
            raise DataError("evaluate: no row has a response")
        return EvaluationSet(encoded(stage, examples, codec), NOTHING)


class _Following(LoopFollower):
    """Gives a ``Trainer`` the loop of its run, and the run what was set before."""

    def __init__(self, owner: RunTrainer) -> None:
        self.owner = owner

    def on_init_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Before any other callback that is given."""
        args.added.update(self.owner.args.added)
        self.owner._args = args

    def follow(self, loop: Loop) -> None:
        """Without those callbacks of the run that were removed."""
        self.owner._loop = loop
        given = [*map(id, self.owner._callbacks)]  # a class that was removed may have come again
        for each in self.owner._without:
            ours = (member for member in loop.callbacks.members if id(member) not in given)
            loop.callbacks.pop(chosen(ours, each))


Trainer = RunTrainer  # the public name, which is also that of the loop
