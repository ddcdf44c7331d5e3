"""The parts of a run, put together in reading order. The only place where they meet."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import interchange
from .address import Address
from .batch import Batch, Outputs
from .callbacks.console import Screen
from .callbacks.early_stop import EarlyStop
from .callbacks.jsonl import NAME as METRICS
from .callbacks.jsonl import Jsonl
from .callbacks.plot import NAME as PLOT
from .callbacks.plot import Plot
from .callbacks.tensorboard import TensorBoard
from .checkpoint.layouts import scattered
from .checkpoint.load import load as load_checkpoint
from .data.chat import Codec
from .data.dataset import EncodedDataset
from .data.loader import Loader
from .data.prepare import Prepared
from .data.templates import disagreement
from .encoding import codec_of, prepared
from .errors import RecipeError
from .model import attention, companions, outputs
from .model.adapter import continue_adapter
from .model.asked_head import AskedHead, asked_head
from .model.load import (
    device,
    grow_embeddings,
    load_model,
    recompute_activations,
    resolve,
    training_dtype,
    upcast_trained,
)
from .model.weights import AdapterWeights, FullWeights, names_in_files
from .optim.state import NamedState
from .parallel.engine import Forward, plain
from .parallel.shard import shard
from .parallel.world import ALONE, World
from .recipe.recipe import Recipe, dump
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


def build(
    recipe: Recipe,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    resume: Path | None = None,
    trust_pickle: bool = False,
    world: World = ALONE,
) -> Trainer:
    """The trainer of a recipe, its states those of the checkpoint ``resume`` if one is given."""
    is_theirs = resume is not None and interchange.is_trainer_checkpoint(resume)
    if resume is not None and is_theirs:
        interchange.check_trainer_checkpoint(resume, trust_pickle=trust_pickle)
    seed_everything(recipe.train.seed)
    use_deterministic_kernels(recipe.train.deterministic)
    base = resolve(recipe.model)
    codec = build_codec(recipe, base)
    with world.main_first():
        data = prepare_data(recipe, codec)
    policy = build_policy(recipe, base, codec.tokenizer)
    saver = build_saver(recipe, policy, codec, base, world)
    trainer = assemble(recipe, policy, data, saver, world)
    trainer.callbacks.members = [*standard_callbacks(recipe, world), *callbacks]
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
    head: AskedHead | None = None  # of ``inner``, if it can be asked for more than logits


def build_policy(recipe: Recipe, base: Path, tokenizer: PreTrainedTokenizerBase) -> Policy:
    """The pretrained model, made ready to learn by the recipe's method."""
    dtype = training_dtype(recipe.model)
    model = load_model(base, recipe.model, dtype=dtype, weights=scattered(base))
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
    weights = AdapterWeights(policy) if is_adapter else FullWeights(model)
    return Policy(policy, model, weights, asked_head(model))


def _refuse_frozen_new_tokens(policy: nn.Module) -> None:
    embeddings: nn.Module = policy.get_input_embeddings()  # type: ignore[operator]
    if not any(p.requires_grad for p in embeddings.parameters()):
        raise RecipeError(
            "model.new_special_tokens: the embeddings of the new tokens would never learn; "
            "name them in method.lora.modules_to_save (embed_tokens, lm_head) or in "
            "method.freeze.extra_modules, or use method: full"
        )


def build_loader(recipe: Recipe, data: Prepared, world: World) -> Loader:
    """Windows of micro-batches from the training examples."""
    return Loader(
        dataset=data.train,
        collate=lambda features: recipe.stage.collate(features, packing=recipe.data.packing),
        global_batch_size=recipe.train.global_batch_size,
        micro_batch_size=recipe.train.micro_batch_size,
        seed=recipe.train.seed,
        shuffle=recipe.data.shuffle,
        rank=world.data_rank,
        world_size=world.num_data_ranks,
    )


def assemble(recipe: Recipe, policy: Policy, data: Prepared, saver: Saver, world: World) -> Trainer:
    """Put the parts together."""
    loader = build_loader(recipe, data, world)
    section, precision = recipe.train, choose(recipe.train.precision)
    names = names_in_files(policy.model, policy.weights)  # before they are cut
    found = shard(
        policy.model,
        policy.inner,
        world,
        recipe.parallel,
        dtype=torch.bfloat16 if precision == "bf16" else None,
    )
    cuts = {names[name]: cut for name, cut in found.items()}
    learning = [(names[n], p) for n, p in policy.model.named_parameters() if p.requires_grad]
    max_steps = section.max_steps or math.ceil(section.num_epochs * loader.steps_per_epoch)
    state = TrainerState(
        max_steps=max_steps,
        num_train_epochs=section.num_epochs,
        train_batch_size=section.micro_batch_size,
    )
    optimizer = recipe.optim.build(learning)
    step = Step(
        optimizer,
        recipe.optim.schedule_over(max_steps),
        plain(build_forward(policy, precision, recipe.stage.needs), device()),
        section.max_grad_norm,
        LossScaler(enabled=precision == "fp16"),
        world.sums,
        world.totals,
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
        weights=replace(policy.weights, cuts=cuts),
        optimizer_state=NamedState(optimizer, cuts),
        step=step,
        forward=build_forward(policy, precision, (*recipe.stage.needs, "predictions")),
        loader=loader,
        evals={name: Batches(recipe, dataset) for name, dataset in data.evals.items()},
        saver=saver,
        callbacks=Callbacks(context, state, control),
        state=state,
        control=control,
        interval=Interval(state, sum(p.numel() for p in policy.model.parameters())),
        world=world,
    )


def build_forward(policy: Policy, precision: PrecisionName, needs: Sequence[str]) -> Forward:
    """A batch through the model to what a stage needs of it."""

    def forward(batch: Batch) -> Outputs:
        with autocast(precision, batch.input_ids.device):
            return outputs.compute(policy.model, batch, needs, head=policy.head)

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


def build_saver(recipe: Recipe, policy: Policy, codec: Codec, base: Path, world: World) -> Saver:
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
        world=world,
    )


def standard_callbacks(recipe: Recipe, world: World = ALONE) -> list[TrainerCallback]:
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
    if not world.is_main:
        return members
    members += [Jsonl(folder / METRICS), Screen(Console(stderr=True)), Plot(folder / PLOT)]
    if "tensorboard" in section.report_to:
        members.append(TensorBoard(folder / "tensorboard"))
    return members


def refuse_in_parallel(recipe: Recipe, world: World) -> None:
    """Raise ``RecipeError`` for what several processes cannot do together yet."""
    if world.size > 1 and isinstance(recipe.train.output_dir, Address):
        raise RecipeError(
            "train.output_dir: a run of several processes cannot save to a store yet; "
            "choose a folder that all of them see"
        )
