"""From a recipe to a trained model, in reading order. The only place where the parts meet."""

from __future__ import annotations

import json
import logging
import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import interchange
from .batch import Batch, Outputs
from .callbacks.console import Screen
from .callbacks.early_stop import EarlyStop
from .callbacks.jsonl import NAME as METRICS
from .callbacks.jsonl import Jsonl
from .callbacks.plot import NAME as PLOT
from .callbacks.plot import Plot
from .callbacks.tensorboard import TensorBoard
from .checkpoint.load import load as load_checkpoint
from .data.chat import Codec
from .data.dataset import EncodedDataset
from .data.loader import Loader
from .data.prepare import Prepared
from .data.templates import disagreement
from .encoding import codec_of, prepared
from .errors import CheckpointError, RecipeError, RunError
from .files import raising, write_aside
from .model import attention, companions, outputs
from .model.adapter import continue_adapter
from .model.load import (
    device,
    grow_embeddings,
    load_model,
    recompute_activations,
    resolve,
    training_dtype,
    upcast_trained,
)
from .model.weights import AdapterWeights, FullWeights, trained
from .optim.state import NamedState
from .parallel.engine import Forward, plain
from .recipe.recipe import Recipe, dump, load, read
from .run_folder import mirror_of, opened, resume_point, write_recipe
from .training.callback import Callbacks, Context, TrainerCallback
from .training.interval import Interval
from .training.precision import LossScaler, PrecisionName, autocast, choose
from .training.randomness import seed_everything, use_deterministic_kernels
from .training.saver import Saver
from .training.stage import Models
from .training.state import TrainerControl, TrainerState
from .training.step import Step
from .training.trainer import Trainer
from .training.triggers import Flow, Trigger

logger = logging.getLogger(__name__)


def train(
    recipe: Recipe | str | Path | Mapping[str, object],
    *,
    callbacks: Sequence[TrainerCallback] = (),
    trust_pickle: bool = False,
    **overrides: object,
) -> TrainerState:
    """Train as the recipe says, from where its output_dir left off, and return the final state.

    Args:
        recipe: a ``Recipe``, the path of a YAML file, or the same as nested mappings.
        callbacks: watchers beside those of the recipe.
        trust_pickle: read the pickles in a checkpoint of Hugging Face's Trainer, if
            ``checkpoint.resume`` names one.
        overrides: sections to change, as nested mappings
            (``optim={"adamw": {"learning_rate": 5e-5}}``) or as dotted paths
            (``**{"optim.adamw.learning_rate": 5e-5}``).

    Raises:
        SurefootError: whatever a user can put right; see ``errors``.
    """
    loaded = read_recipe(recipe, overrides)
    return run(loaded, callbacks=callbacks, trust_pickle=trust_pickle).state


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its state, and the signal that stopped it, if one did."""

    state: TrainerState
    signal: signal.Signals | None = None


def run(
    recipe: Recipe, *, callbacks: Sequence[TrainerCallback] = (), trust_pickle: bool = False
) -> Outcome:
    """Start a run, or go on with it; see ``train``."""
    with opened(recipe) as folder:
        interchange.refuse_output_dir(folder.path)
        start = resume_point(folder, recipe)
        trainer = build(recipe, callbacks=callbacks, resume=start, trust_pickle=trust_pickle)
        write_recipe(folder, recipe)
        trainer.saver.mirror = mirror = mirror_of(folder, recipe)
        if start is not None:
            trainer.saver.forget_old(trainer.state)  # a smaller keep makes room before a save
        with mirror or nullcontext():
            return _fit(trainer)


def _fit(trainer: Trainer) -> Outcome:
    state = trainer.state
    if state.global_step >= state.max_steps and not state.pending:
        logger.info(
            "this run is complete: %d of %d steps. "
            "To train on, raise train.num_epochs or train.max_steps",
            state.global_step,
            state.max_steps,
        )
        return Outcome(state)
    with trainer.stop:  # also after the last step: a signal lets the last upload finish
        trainer.fit()
        _must_be_saved(trainer)
        finish(trainer)
        trainer.saver.settle(state)
    return Outcome(state, trainer.stop.received)


def _must_be_saved(trainer: Trainer) -> None:
    """A run whose last save failed (``on_save_error: continue``) has not done what it was for."""
    step, newest = trainer.state.global_step, trainer.saver.newest
    ended = step >= trainer.state.max_steps or trainer.stop.received is not None
    if ended and newest != trainer.saver.path_of(step):
        raise CheckpointError(
            f"step {step}, the last one, could not be saved; the newest checkpoint is "
            f"{newest or 'none'}. Make room, then start the same command again to go on from there"
        )


def read_recipe(
    recipe: Recipe | str | Path | Mapping[str, object], overrides: Mapping[str, object]
) -> Recipe:
    """The recipe to run, from whatever form it is given in."""
    if isinstance(recipe, Recipe):
        return read(recipe, overrides) if overrides else recipe
    if isinstance(recipe, Mapping):
        return read(recipe, overrides)
    return load(Path(recipe), overrides)


def build(
    recipe: Recipe,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    resume: Path | None = None,
    trust_pickle: bool = False,
) -> Trainer:
    """The trainer of a recipe, its states those of the checkpoint ``resume`` if one is given."""
    is_theirs = resume is not None and interchange.is_trainer_checkpoint(resume)
    if resume is not None and is_theirs:
        interchange.check_trainer_checkpoint(resume, trust_pickle=trust_pickle)
    seed_everything(recipe.train.seed)
    use_deterministic_kernels(recipe.train.deterministic)
    base = resolve(recipe.model)
    codec = build_codec(recipe, base)
    data = prepare_data(recipe, codec)
    policy = build_policy(recipe, base, codec.tokenizer)
    saver = build_saver(recipe, policy, codec, base)
    trainer = assemble(recipe, policy, data, saver)
    trainer.callbacks.members = [*standard_callbacks(recipe), *callbacks]
    if resume is not None:
        trainer.saver.resumed_from = resume
        if is_theirs:
            interchange.load_trainer_checkpoint(resume, trainer, trust_pickle=trust_pickle)
        else:
            load_checkpoint(resume, trainer.states)
            trainer.saver.newest = resume
        logger.info("going on from %s, step %d", resume.name, trainer.state.global_step)
    trainer.callbacks.emit("on_init_end")
    return trainer


def build_codec(recipe: Recipe, base: Path) -> Codec:
    """Tokenizer and chat template; from here on the tokenizer carries the template that is used."""
    codec = codec_of(recipe, base)
    if recipe.stage.uses_template:
        if difference := disagreement(codec.template, codec.tokenizer):
            logger.warning("%s", difference)
        codec.tokenizer.chat_template = codec.template.source
    return codec


def prepare_data(recipe: Recipe, codec: Codec) -> Prepared:
    """Encoded datasets, from the cache where they are in it; what was left out is logged."""
    found = prepared(recipe, codec)
    for line in found.report.lines():
        logger.info("%s", line)
    return found


@dataclass(frozen=True)
class Policy:
    """The model that learns."""

    model: nn.Module
    inner: PreTrainedModel  # the same without its adapter
    weights: FullWeights | AdapterWeights  # what its checkpoints hold


def build_policy(recipe: Recipe, base: Path, tokenizer: PreTrainedTokenizerBase) -> Policy:
    """The pretrained model, made ready to learn by the recipe's method."""
    model = load_model(base, recipe.model, dtype=training_dtype(recipe.model))
    grew = grow_embeddings(model, tokenizer)
    if recipe.data.packing:
        attention.use_packed(model)
    if recipe.model.gradient_checkpointing:
        recompute_activations(model)
    seed_everything(recipe.train.seed, 1)
    if recipe.model.adapter is not None:
        policy = continue_adapter(model, recipe.model.adapter)
    else:
        policy = recipe.method.apply(model)
    if grew:
        _refuse_frozen_new_tokens(policy)
    upcast_trained(policy, recipe.model)
    learning = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    share = learning / sum(p.numel() for p in policy.parameters())
    logger.info("%s parameters learn, %.3g %% of all", f"{learning:,}", 100 * share)
    is_adapter = recipe.method.kind == "adapter"
    return Policy(policy, model, AdapterWeights(policy) if is_adapter else FullWeights(model))


def _refuse_frozen_new_tokens(policy: nn.Module) -> None:
    embeddings: nn.Module = policy.get_input_embeddings()  # type: ignore[operator]
    if not any(p.requires_grad for p in embeddings.parameters()):
        raise RecipeError(
            "model.new_special_tokens: the embeddings of the new tokens would never learn; "
            "name them in method.lora.modules_to_save (embed_tokens, lm_head) or in "
            "method.freeze.extra_modules, or use method: full"
        )


def build_loader(recipe: Recipe, data: Prepared) -> Loader:
    """Windows of micro-batches from the training examples."""
    return Loader(
        dataset=data.train,
        collate=lambda features: recipe.stage.collate(features, packing=recipe.data.packing),
        global_batch_size=recipe.train.global_batch_size,
        micro_batch_size=recipe.train.micro_batch_size,
        seed=recipe.train.seed,
        shuffle=recipe.data.shuffle,
    )


def assemble(recipe: Recipe, policy: Policy, data: Prepared, saver: Saver) -> Trainer:
    """Put the parts together."""
    loader = build_loader(recipe, data)
    section, precision = recipe.train, choose(recipe.train.precision)
    max_steps = section.max_steps or math.ceil(section.num_epochs * loader.steps_per_epoch)
    state = TrainerState(
        max_steps=max_steps,
        num_train_epochs=section.num_epochs,
        train_batch_size=section.micro_batch_size,
    )
    optimizer = recipe.optim.build(trained(policy.model, policy.weights))
    step = Step(
        optimizer,
        recipe.optim.schedule_over(max_steps),
        plain(build_forward(policy.model, precision, recipe.stage.needs), device()),
        section.max_grad_norm,
        LossScaler(enabled=precision == "fp16"),
    )
    control = TrainerControl()
    context = Context(
        section,
        policy.model,
        optimizer,
        section.folder,
        len(data.train),
        loader.steps_per_epoch,
    )
    return Trainer(
        section=section,
        stage=recipe.stage,
        models=Models(policy.model),
        weights=policy.weights,
        optimizer_state=NamedState(optimizer),
        step=step,
        forward=build_forward(policy.model, precision, (*recipe.stage.needs, "predictions")),
        loader=loader,
        evals={name: Batches(recipe, dataset) for name, dataset in data.evals.items()},
        saver=saver,
        callbacks=Callbacks(context, state, control),
        state=state,
        control=control,
        interval=Interval(state, sum(p.numel() for p in policy.model.parameters())),
    )


def build_forward(model: nn.Module, precision: PrecisionName, needs: Sequence[str]) -> Forward:
    """A batch through the model to what a stage needs of it."""

    def forward(batch: Batch) -> Outputs:
        with autocast(precision, batch.input_ids.device):
            return outputs.compute(model, batch, needs)

    return forward


@dataclass(frozen=True)
class Batches:
    """The micro-batches of an evaluation set, in order, as often as they are asked for."""

    recipe: Recipe
    dataset: EncodedDataset

    def __iter__(self) -> Iterator[Batch]:
        size = self.recipe.train.micro_batch_size
        for start in range(0, len(self.dataset), size):
            rows = [self.dataset[i] for i in range(start, min(start + size, len(self.dataset)))]
            yield self.recipe.stage.collate(rows, packing=self.recipe.data.packing)


def build_saver(recipe: Recipe, policy: Policy, codec: Codec, base: Path) -> Saver:
    """Where checkpoints go and what lies beside the weights in each of them."""
    files = {
        "recipe.yaml": dump(recipe).encode(),
        **companions.tokenizer_files(codec.tokenizer),
    }
    if recipe.method.kind == "adapter":
        files |= companions.adapter_files(policy.model, recipe.model)
    else:
        files |= companions.model_files(policy.inner, base, codec.stop_token_ids)
    layout = recipe.checkpoint.layout_in(recipe.train.output_dir)
    return Saver(
        output_dir=recipe.train.folder,
        section=replace(recipe.checkpoint, layout=layout),
        kind=recipe.method.kind,
        companions=files,
        steps={
            "log_steps": recipe.train.log_steps,
            "eval_steps": recipe.train.eval_steps,
            "save_steps": recipe.checkpoint.save_steps,
        },
        metric=recipe.train.metric_for_best_model,
        greater=recipe.train.is_greater_better,
    )


def standard_callbacks(recipe: Recipe) -> list[TrainerCallback]:
    """The callbacks the recipe asks for, in the order they are called."""
    section, checkpoint, folder = recipe.train, recipe.checkpoint, recipe.train.folder
    members: list[TrainerCallback] = [
        Flow(
            Trigger(section.log_steps, section.log_minutes, section.log_epoch),
            Trigger(section.eval_steps, section.eval_minutes, section.eval_epoch),
            Trigger(checkpoint.save_steps, checkpoint.save_minutes, checkpoint.save_epoch),
        )
    ]
    if section.early_stopping_patience is not None:
        members.append(EarlyStop(section.early_stopping_patience, section.early_stopping_threshold))
    members += [Jsonl(folder / METRICS), Screen(Console(stderr=True)), Plot(folder / PLOT)]
    if "tensorboard" in section.report_to:
        members.append(TensorBoard(folder / "tensorboard"))
    return members


def finish(trainer: Trainer) -> None:
    """Write ``all_results.json``; end with the best weights if the recipe says so."""
    state, section = trainer.state, trainer.section
    if trainer.stop.received is not None:
        return
    best = state.best_global_step
    if section.load_best_model_at_end and best is not None:
        load_checkpoint(trainer.saver.path_of(best), trainer.states, only=["model"])
        logger.info(
            "best: checkpoint-%d, %s %.4g", best, section.metric_for_best_model, state.best_metric
        )
    steps = max(1, state.global_step - state.num_skipped_steps)
    evaluations = [record for record in state.log_history if "eval_loss" in record]
    results: dict[str, object] = {
        "global_step": state.global_step,
        "epoch": state.epoch,
        "train_loss": state.train_loss_total / steps,
        "train_runtime": state.train_runtime,
        "seconds_stopped_by_saves": trainer.saver.seconds_stopped,
        "num_input_tokens_seen": state.num_input_tokens_seen,
        "total_flos": state.total_flos,
        "best_metric": state.best_metric,
        "best_global_step": best,
        **(evaluations[-1] if evaluations else {}),
    }
    results.pop("step", None)
    text = json.dumps(results, indent=2, sort_keys=True) + "\n"
    with raising(RunError, "results"):
        write_aside(section.folder / "all_results.json", text.encode())
