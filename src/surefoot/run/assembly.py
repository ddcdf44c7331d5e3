"""The parts of a run, put together in reading order. The only place where they meet."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from .. import interchange
from ..batch import OutputSpec
from ..checkpoint.background.saver import SaveListener
from ..checkpoint.reading.loading import load as load_checkpoint
from ..data.store.run_data import TrainingData
from ..data.text.codec import Codec
from ..data.text.templates import template_mismatch
from ..errors import RecipeError
from ..methods.full import Full
from ..model.attention import packed, selection
from ..model.malloc import keep_freed_memory
from ..model.precision import LossScaler, choose
from ..model.pretrained import companions
from ..model.pretrained.loading import resolve
from ..model.seeding import seed_everything, use_deterministic_kernels
from ..network.draft import NetworkOptions
from ..network.meta import select_packed_attention, select_prompt_sharing
from ..network.network import Network
from ..network.open import open_network
from ..parallel.world import ALONE, World
from ..recipe.recipe import Recipe, dump
from ..recipe.recipe_data import open_codec
from ..references import ReferenceLogps, reference_model, references
from ..training.callback import Callbacks, Context, TrainerCallback
from ..training.log_accumulator import LogAccumulator
from ..training.saver import Saver
from ..training.stage import Models, measured, smoothing
from ..training.state import TrainerControl, TrainerState
from ..training.step import Step
from ..training.trainer import Trainer
from . import data_loading
from .recipe_callbacks import standard_callbacks

logger = logging.getLogger(__name__)


def build(
    recipe: Recipe,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    resume: Path | None = None,
    trust_pickle: bool = False,
    world: World = ALONE,
    is_trial: bool = False,
    listeners: Sequence[SaveListener] = (),
) -> Trainer:
    """The trainer of a recipe, its states those of the checkpoint ``resume`` if one is given. Of a
    trial only the speed matters: no reference is asked about its examples."""
    writer: interchange.Writer | None = None
    if resume is not None:
        writer = interchange.detect_trainer(resume, trust_pickle=trust_pickle, pp=world.pp)
    seed_everything(recipe.train.seed)
    use_deterministic_kernels(recipe.train.deterministic)
    keep_freed_memory()
    base = resolve(recipe.model)
    codec = build_codec(recipe, base)
    data, feeder = data_loading.open_data(recipe, codec, base, world)
    asked = references(recipe, base, data, world)
    if asked is not None and not is_trial:
        precompute_with_other_model(recipe, codec, asked, world)
    is_asked = asked is None or asked.is_complete or is_trial
    is_kept = resume is not None and writer != "trainer" and recipe.method.kind == "full"
    is_kept = is_kept and is_asked  # what is not to be asked anything need not have values
    policy = open_policy(recipe, base, codec.tokenizer, world, is_read=not is_kept)
    saver = build_saver(recipe, policy, codec, base, world)
    is_foreign = writer is not None
    saver = replace(saver, resumed_from=resume, is_foreign=is_foreign, listeners=listeners)
    trainer = assemble(recipe, policy, data, saver, world)
    if asked is not None:
        attach_reference_logps(trainer, recipe, policy, data, asked.blank() if is_trial else asked)
    trainer.feeder = feeder
    trainer.callbacks.members = [*standard_callbacks(recipe, world), *callbacks]
    if resume is not None:
        if writer is not None:
            interchange.resume_from(resume, writer, trainer, base=base, trust_pickle=trust_pickle)
        else:
            load_checkpoint(resume, trainer.states)
        logger.info("going on from %s, step %d", resume.name, trainer.state.global_step)
    kernels = trainer.state.kernels
    if can_select_attention(recipe, policy, world):
        known = kernels.packed_attention or (selection.BY_DOCUMENT if resume else None)
        dtype = policy_dtype(recipe, policy)
        bounds = data_loading.packed_bounds(recipe, trainer.loader)
        kernels.packed_attention = select_packed_attention(
            policy.inner, bounds, dtype, known, world
        )
    if recipe.data.packing and policy.awaits_values:
        policy.verify_packing()  # it has values only now
    if recipe.data.packing:
        known_sharing = kernels.shared_prompts
        kernels.shared_prompts = select_prompt_sharing(policy.sharing, policy.inner, known_sharing)
    trainer.callbacks.emit("on_init_end")
    return trainer


def precompute_with_other_model(
    recipe: Recipe, codec: Codec, asked: ReferenceLogps, world: World
) -> None:
    """Ask the model that the recipe compares with, if it is another one than that which will learn;
    it is loaded for that, and let go. Raises ``RecipeError`` if it has other tokens."""
    model = reference_model(recipe)
    if model is recipe.model or asked.is_complete:
        return
    other, base = replace(recipe, model=model, method=Full()), resolve(model)
    tokenizer = open_codec(other, base).tokenizer
    if tokenizer.get_vocab() != codec.tokenizer.get_vocab():
        raise RecipeError(
            f"stage.dpo.reference: {model.path} has other tokens than {recipe.model.path}, so what "
            "it says of an answer is not to be compared; name a model with the same tokenizer"
        )
    options = replace(options_of(other), is_trainable=False)
    network = open_network(base, model, tokenizer, world, options)
    forward = partial(network.forward, spec=OutputSpec(recipe.stage.needs))
    asked.ask(forward, network.module, data_loading.build_collate(other, network.sharing))


def attach_reference_logps(
    trainer: Trainer, recipe: Recipe, policy: Network, data: TrainingData, asked: ReferenceLogps
) -> None:
    """Let the examples of ``trainer``, which has not begun, have what the reference says of them,
    that is, its own policy now."""
    collate, world = data_loading.build_collate(recipe, policy.sharing), trainer.world
    asked.ask(trainer.forward, policy.module, collate)
    data = asked.added(data)
    trainer.loader = data_loading.build_loader(recipe, data, collate, world)
    trainer.evals = data_loading.build_evals(recipe, data, collate, world)


def build_codec(recipe: Recipe, base: Path) -> Codec:
    """Tokenizer and chat template; from here on the tokenizer carries the template that is used."""
    codec = open_codec(recipe, base)
    if recipe.stage.uses_template:
        if difference := template_mismatch(codec.template, codec.tokenizer):
            logger.warning("%s", difference)
        codec.tokenizer.chat_template = codec.template.source
    return codec


def open_policy(
    recipe: Recipe,
    base: Path,
    tokenizer: PreTrainedTokenizerBase,
    world: World = ALONE,
    *,
    is_read: bool = True,
) -> Network:
    """The model that a recipe trains; without values if not ``is_read``, because a checkpoint has
    all of them."""
    options = options_of(recipe, is_read=is_read)
    made = open_network(base, recipe.model, tokenizer, world, options)
    share = made.num_trainable / made.num_parameters
    logger.info("%s parameters learn, %.3g %% of all", f"{made.num_trainable:,}", 100 * share)
    return made


def options_of(recipe: Recipe, *, is_read: bool = True) -> NetworkOptions:
    """How the model of a recipe is made ready."""
    return NetworkOptions(
        method=recipe.method,
        parallel=recipe.parallel,
        precision=choose(recipe.train.precision),
        packing=recipe.data.packing,
        seed=recipe.train.seed,
        is_read=is_read,
    )


def can_select_attention(recipe: Recipe, policy: Network, world: World) -> bool:
    """Whether the run selects the kernel of its packed rows."""
    kernel, is_free = policy.inner.config._attn_implementation, recipe.model.attention == "auto"
    return recipe.data.packing and is_free and world.pp == 1 and kernel == f"{packed.PREFIX}sdpa"


def policy_dtype(recipe: Recipe, policy: Network) -> torch.dtype:
    """The type that most of the arithmetic is done in."""
    held: torch.dtype = policy.inner.dtype
    types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": held}
    return types[choose(recipe.train.precision)]


def assemble(
    recipe: Recipe, policy: Network, data: TrainingData, saver: Saver, world: World
) -> Trainer:
    """Put the parts together."""
    collate = data_loading.build_collate(recipe, policy.sharing)
    loader = data_loading.build_loader(recipe, data, collate, world)
    section, precision = recipe.train, choose(recipe.train.precision)
    max_steps = data_loading.num_steps(section, loader.steps_per_epoch)
    state = TrainerState(
        max_steps=max_steps,
        num_train_epochs=section.num_epochs,
        train_batch_size=section.micro_batch_size,
    )
    optimizer = recipe.optim.build(list(policy.named.items()))
    spec = OutputSpec(recipe.stage.needs, smoothing=smoothing(recipe.stage))
    control = TrainerControl()
    counts = loader.num_examples, loader.steps_per_epoch
    context = Context(section, policy.module, optimizer, section.folder, *counts)
    return Trainer(
        section=section,
        stage=recipe.stage,
        models=Models(policy.module),
        weights=policy.weights,
        optimizer_state=policy.optimizer_state(optimizer),
        step=Step(
            optimizer,
            recipe.optim.schedule_over(max_steps),
            policy.engine.step_runner(spec),
            section.max_grad_norm,
            LossScaler(enabled=precision == "fp16"),
            world.summed,
            world.totals,
            copies=policy.replicas,
        ),
        forward=partial(policy.forward, spec=replace(spec, outputs=measured(recipe.stage))),
        loader=loader,
        evals=data_loading.build_evals(recipe, data, collate, world),
        saver=saver,
        callbacks=Callbacks(context, state, control),
        state=state,
        control=control,
        interval=LogAccumulator(state, policy.num_parameters),
        world=world,
    )


def build_saver(recipe: Recipe, policy: Network, codec: Codec, base: Path, world: World) -> Saver:
    """Where checkpoints go and what lies beside the weights in each of them."""
    files = {
        "recipe.yaml": dump(recipe).encode(),
        **companions.tokenizer_files(codec.tokenizer),
    }
    if recipe.method.kind == "adapter":
        files |= companions.adapter_files(policy.module, recipe.model)
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
