"""Assemble the parts of a run, in reading order. The only place where they meet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from .. import interchange
from ..batch import StepRunner
from ..checkpoint.background.saver import SaveListener
from ..checkpoint.reading.loading import load as load_checkpoint
from ..data.text.codec import Codec
from ..data.text.templates import template_mismatch
from ..model.attention import packed, selection
from ..model.malloc import keep_freed_memory
from ..model.precision import LossScaler, choose
from ..model.pretrained import companions
from ..model.pretrained.loading import resolve
from ..model.seeding import derive, seed_everything, use_deterministic_kernels
from ..network.draft import NetworkOptions
from ..network.meta import select_packed_attention, select_prompt_sharing
from ..network.network import Network
from ..network.open import open_network
from ..parallel.world import ALONE, World
from ..recipe.recipe import Recipe, dump
from ..recipe.recipe_data import open_codec
from ..training.callback import Callbacks, Context, TrainerCallback
from ..training.context import NetworkContext, collate_of
from ..training.evaluation import Evaluation
from ..training.learner import Learner
from ..training.log_accumulator import LogAccumulator
from ..training.saver import Saver
from ..training.stage import POLICY
from ..training.state import TrainerControl, TrainerState
from ..training.step import Step
from ..training.trainer import Trainer
from ..training.windows import Place, Windows, num_steps
from . import data_loading
from .auxiliary import Ahead, open_ahead
from .recipe_callbacks import standard_callbacks

logger = logging.getLogger(__name__)
Around = Callable[[StepRunner], StepRunner]


def build(
    recipe: Recipe,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    resume: Path | None = None,
    trust_pickle: bool = False,
    world: World = ALONE,
    listeners: Sequence[SaveListener] = (),
    trial: Around | None = None,
) -> Trainer:
    """The Trainer of a recipe, with the states of the checkpoint ``resume`` if one is given.

    ``trial`` is for measurements of speed: it wraps forward and backward, auxiliary models compute
    nothing, and there are no callbacks except the given ones.
    """
    writer: interchange.ForeignTrainer | None = None
    if resume is not None:
        writer = interchange.detect_trainer(resume, trust_pickle=trust_pickle, pp=world.pp)
    seed_everything(recipe.train.seed)
    use_deterministic_kernels(recipe.train.deterministic)
    keep_freed_memory()
    base = resolve(recipe.model)
    codec = build_codec(recipe, base)
    data, feeder = data_loading.open_data(recipe, codec, base, world)
    ahead = open_ahead(recipe, base, codec, data, world)
    if trial is not None:
        ahead.blank()
    ahead.run_without_policy()
    needs_base = resume is None or (writer is not None and writer.needs_base)
    is_kept = not needs_base and recipe.method.saves_base_model
    is_kept = is_kept and ahead.found.is_complete  # what computes nothing need not have values
    policy = open_policy(recipe, base, codec.tokenizer, world, is_read=not is_kept)
    ahead.run(policy)
    saver = build_saver(recipe, policy, codec, base, world)
    saver = replace(saver, resumed_from=resume, is_foreign=writer is not None, listeners=listeners)
    members = [*([] if trial else standard_callbacks(recipe, world)), *callbacks]
    trainer = assemble(recipe, codec, policy, ahead, saver, members, feeder, trial=trial)
    if resume is not None:
        if writer is not None:
            interchange.resume_from(resume, writer, trainer, base=base, trust_pickle=trust_pickle)
        else:
            load_checkpoint(resume, trainer.states)
        trainer.policy.trained.check(trainer.state.global_step)
        logger.info("resuming from %s at step %d", resume.name, trainer.state.global_step)
    settle_packing(recipe, trainer, policy, is_resumed=resume is not None)
    trainer.callbacks.emit("on_init_end")
    return trainer


def assemble(
    recipe: Recipe,
    codec: Codec,
    policy: Network,
    ahead: Ahead,
    saver: Saver,
    members: Sequence[TrainerCallback] = (),
    feeder: AbstractContextManager[object] | None = None,
    *,
    trial: Around | None = None,
) -> Trainer:
    """Assemble the parts."""
    section, stage, world = recipe.train, recipe.stage, ahead.world
    collate = collate_of(stage, policy.sharing, packing=recipe.data.packing)
    loader = data_loading.build_loader(recipe, ahead.data, collate, world)

    def context(place: Place) -> NetworkContext:
        seed = derive(section.seed, *place)
        sizes = section.micro_batch_size, recipe.data.packing
        return NetworkContext(codec, stage, {POLICY: policy}, *sizes, world, seed)

    windows = Windows(loader, stage, context, ahead.kept, section.seed)
    max_steps = num_steps(section, windows.steps_per_epoch)
    state = TrainerState(
        max_steps=max_steps,
        num_train_epochs=section.num_epochs,
        train_batch_size=section.micro_batch_size,
    )
    learner = build_learner(recipe, policy, max_steps, trial or _alone)
    control = TrainerControl()
    counts = loader.num_examples, windows.steps_per_epoch
    args = Context(section, policy.module, learner, section.folder, *counts)
    return Trainer(
        section=section,
        stage=stage,
        learners={POLICY: learner},
        windows=windows,
        evals=ahead.evals,
        evaluation=Evaluation(
            stage,
            policy,
            context,
            collate,
            section.micro_batch_size,
            section.global_batch_size,
            world,
        ),
        saver=saver,
        callbacks=Callbacks(args, state, control, members),
        state=state,
        control=control,
        interval=LogAccumulator(state, policy.num_parameters),
        world=world,
        feeder=feeder or nullcontext(),
    )


def _alone(run_window: StepRunner) -> StepRunner:
    return run_window


def build_learner(recipe: Recipe, policy: Network, max_steps: int, around: Around) -> Learner:
    """The policy with its optimizer."""
    world, stage = policy.world, recipe.stage
    trained = policy.trained(recipe.optim, recipe.method.trainable)
    step = Step(
        trained.optimizer,
        recipe.optim.schedule_over(max_steps),
        around(partial(policy.forward_backward, spec=stage.spec)),
        recipe.train.max_grad_norm,
        LossScaler(enabled=choose(recipe.train.precision) == "fp16"),
        world.summed,
        world.totals,
        copies=policy.replicas,
    )
    return Learner(policy, stage.spec, step, trained)


def settle_packing(recipe: Recipe, trainer: Trainer, policy: Network, *, is_resumed: bool) -> None:
    """How packed rows are computed, as in a resumed run: the kernel, and whether prompts are
    shared.
    """
    kernels = trainer.state.kernels
    if can_select_attention(recipe, policy, trainer.world):
        known = kernels.packed_attention or (selection.BY_DOCUMENT if is_resumed else None)
        dtype = policy_dtype(recipe, policy)
        bounds = data_loading.packed_bounds(recipe, trainer.windows.loader)
        chosen = select_packed_attention(policy.inner, bounds, dtype, known, trainer.world)
        kernels.packed_attention = chosen
    if recipe.data.packing and policy.awaits_values:
        policy.verify_packing()  # it has values only now
    if recipe.data.packing:
        known_sharing = kernels.shared_prompts
        kernels.shared_prompts = select_prompt_sharing(policy.sharing, policy.inner, known_sharing)


def build_codec(recipe: Recipe, base: Path) -> Codec:
    """Tokenizer and chat template; from here on the tokenizer contains the template in use."""
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
    """The model that a recipe trains; on the meta device if not ``is_read``, because a
    checkpoint has all of its weights.
    """
    options = options_of(recipe, is_read=is_read)
    made = open_network(base, recipe.model, tokenizer, world, options)
    share = made.num_trainable / made.num_parameters
    logger.info("trainable parameters: %s (%.3g %% of all)", f"{made.num_trainable:,}", 100 * share)
    return made


def options_of(recipe: Recipe, *, is_read: bool = True) -> NetworkOptions:
    """The options for the model of a recipe."""
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
    """The dtype of most of the computation."""
    held: torch.dtype = policy.inner.dtype
    types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": held}
    return types[choose(recipe.train.precision)]


def build_saver(recipe: Recipe, policy: Network, codec: Codec, base: Path, world: World) -> Saver:
    """The saver of a run: the folder of its checkpoints, and their companions."""
    files = {
        "recipe.yaml": dump(recipe).encode(),
        **companions.tokenizer_files(codec.tokenizer),
    }
    files |= policy.weights.small_files(recipe.model, base, codec.stop_token_ids)
    layout = recipe.checkpoint.layout_in(recipe.train.output_dir)
    return Saver(
        output_dir=recipe.train.folder,
        section=replace(recipe.checkpoint, layout=layout),
        kind=policy.weights.kind,
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
