"""A run from its recipe, in reading order: ``build``, and below it each part, in that order."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from ..checkpoint.apart import Apart
from ..checkpoint.disk.folder import tokenizer_of
from ..checkpoint.fetching import is_outline
from ..checkpoint.saving.listeners import SaveListener
from ..checkpoint.saving.preparation import WriterGroup
from ..checkpoint.saving.saver import AsyncSaver
from ..model import products, weights
from ..model.numerics import keep_freed_memory, seed_everything, use_deterministic_kernels
from ..model.tokenizer import with_eos
from ..network.network import Network
from ..parallel.progress import DATA, TRAINING
from ..parallel.world import ALONE, World
from ..recipe.files import RUN_RECIPE
from ..recipe.recipe import Recipe
from ..training.arguments import Context
from ..training.callback import Callbacks, PolicyVersion, TrainerControl, TrainerState
from ..training.callbacks.launches import NAME as LAUNCHES
from ..training.callbacks.metric_files import METRICS, TENSORBOARD
from ..training.callbacks.step_files import ROWS, STEPS, StepFiles
from ..training.control import LogAccumulator, save_trigger, standard_callbacks
from ..training.kept_rollouts import KeptRollouts
from ..training.out_of_memory import MemoryGuard
from ..training.stage import POLICY
from ..training.trainer import Trainer
from ..training.views import DataView
from ..training.windows import Windows, num_steps, steps_per_epoch
from . import _data_loading as data_loading
from .contexts import ColumnsAhead, RunColumns, build_evaluation, served_policy
from .from_python import AS_IN_THE_RECIPE, StageParts
from .models import open_models, separate_roles, with_auxiliary
from .parts import RunParts, Start
from .policy import (
    Around,
    build_learner,
    compare_prepared,
    compare_read,
    end_with_responses,
    open_policy,
    read_besides,
    settle_packing,
)

logger = logging.getLogger(__name__)


def build(
    recipe: Recipe,
    *,
    callbacks: Sequence[object] = (),
    resume: Path | Start | None = None,
    world: World = ALONE,
    listeners: Sequence[SaveListener] = (),
    trial: Around | None = None,
    stage_parts: StageParts = AS_IN_THE_RECIPE,
    apart: Apart | None = None,
) -> Trainer:
    """The Trainer of a recipe, with the states of the checkpoint ``resume`` if one is given, and
    ``stage_parts`` in place of the stage's. Ranks save to one folder, or ``apart`` in a store.
    ``trial`` is for measurements of speed: it wraps forward and backward, auxiliary models compute
    nothing, and there are no callbacks except the given ones."""
    start = Start.of(resume, world) if isinstance(resume, Path) else resume
    parts = RunParts.of(recipe, start, world, stage_parts, is_recorded=trial is None)
    prepare_process(parts, world)
    data, feeder = data_loading.open_data(parts, world)
    if trial is None and world.is_main:
        data_loading.log_example(parts.codec, data)
    parts = parts.for_data(data)
    columns = ColumnsAhead.of(parts, data, world, is_trial=trial is not None)
    if trial is not None:
        columns.blank()
    # What needs no policy is computed before it is opened: a reference beside it is half as much
    # memory again and a third more work a step, for numbers that never change (decisions/0038).
    if not columns.needs_policy:
        columns.compute(world, open_models(parts.models, columns.roles, parts.codec, world))
    policy = open_policy(parts, world, needs_start=columns.needs_policy)
    if columns.needs_policy:
        ahead = open_models(parts.models, columns.roles, parts.codec, world)
        columns.compute(world, ahead, policy)
        del ahead  # no name keeps what is not needed any more in memory
    others = open_models(parts.models, separate_roles(parts.models, policy), parts.codec, world)
    networks = with_auxiliary(parts.models, policy, others)
    saver = build_saver(parts, policy, listeners, apart)
    read = read_besides(parts, policy, data)
    end_with_responses(policy, parts.codec)  # the files beside the weights have their own
    trainer = build_trainer(
        parts, networks, columns.joined(), saver, callbacks, feeder, trial=trial
    )
    parts.restore(trainer)
    compare_read(trainer.state, read)
    # What a restored state decides, and nothing else, is settled after it.
    trainer.windows.memory.recall(trainer.state.global_step)
    settle_packing(parts, trainer, policy)
    compare_prepared(trainer.state.kernels, policy)
    trainer.callbacks.emit("on_init_end")
    return trainer


def prepare_process(parts: RunParts, world: World) -> None:
    """Let this process compute as the run does, and tell the watchdog what is slow in it."""
    use_deterministic_kernels(parts.train.deterministic)
    products.use_chosen()
    # The C library gave large blocks back to the system and took them again page by page: 300,000
    # pages in eight steps of a small model.
    keep_freed_memory()
    seed_everything(parts.train.seed)
    if parts.models.policy.section.compile:
        world.progress.allow_long(TRAINING)
    if parts.stage.max_new_tokens:
        world.progress.allow_long(DATA)  # responses may be much longer than those before


def build_saver(
    parts: RunParts,
    policy: Network,
    listeners: Sequence[SaveListener] = (),
    apart: Apart | None = None,
) -> AsyncSaver:
    """The saver of a run: the folder of its checkpoints, and their companions."""
    world, codec, base = policy.world, parts.codec, parts.base
    saved_tokenizer = tokenizer_of(Path(codec.tokenizer.name_or_path))
    files = {RUN_RECIPE: parts.text.encode()}
    tokenizer = with_eos(codec.tokenizer, parts.models.policy.section.eos_token)
    files |= weights.tokenizer_files(tokenizer, saved_tokenizer)
    files |= {} if codec.media is None else codec.media.processor.files
    files |= policy.weights.small_files(base.at_commit(), base.folder, codec.stop_token_ids)
    section, train, start = parts.saves, parts.train, parts.start
    resumed_from = None if start is None else start.folder
    if resumed_from is not None and is_outline(resumed_from):
        resumed_from = train.folder / resumed_from.name  # of which there is one on each machine
    return AsyncSaver(
        train.folder,
        keep=section.rule(),
        resumed_from=resumed_from,
        is_foreign=start is not None and start.writer is not None,
        share=section.share_unchanged,
        in_background=section.async_save,
        max_shard_size=section.max_shard_size,
        greater_is_better=train.is_greater_better,
        on_error=section.on_save_error,
        has_lock=True,  # the run has locked its folder from the start
        writers=WriterGroup(
            section.layout_in(train.output_dir),
            world.rank,
            world.size,
            world.axes,
            world.gathered,
            world.from_main,
            world.of_stages,
            is_apart=apart is not None,
        ),
        apart=apart,
        listeners=listeners,
        beside=(METRICS, LAUNCHES, TENSORBOARD, STEPS, ROWS),
        kind=policy.weights.kind,
        companions={**files, **parts.record},
        on_busy=section.on_save_busy,
    )


def build_trainer(
    parts: RunParts,
    networks: Mapping[str, Network],
    columns: RunColumns,
    saver: AsyncSaver,
    members: Sequence[object],
    feeder: AbstractContextManager[object],
    *,
    trial: Around | None = None,
) -> Trainer:
    """The loop over its parts; ``networks`` are the policy and those that stay beside it."""
    section, stage, policy = parts.train, parts.stage, networks[POLICY]
    world, folder = policy.world, None if trial else section.folder
    memory = replace(MemoryGuard.of(section, world), folder=folder)
    collation = parts.collation.for_model(policy.sharing)
    loader = data_loading.build_loader(parts, columns.data, collation, world)
    num_steps_per_epoch = steps_per_epoch(loader, stage)
    state = TrainerState(
        max_steps=num_steps(section, num_steps_per_epoch),
        num_train_epochs=section.num_epochs,
        train_batch_size=section.fixed_micro_batch_size,
        is_local_process_zero=world.is_local_main,
        is_world_process_zero=world.is_main,
        fitted=memory.sizes,
    )
    evaluation = build_evaluation(
        parts,
        networks,
        world,
        memory,
        served=None if trial else served_policy(parts, policy, saver, world),
        version=PolicyVersion(state),
        kept=KeptRollouts(folder),
    )
    windows = Windows(
        loader,
        stage,
        evaluation.context,
        columns.kept,
        section.seed,
        memory,
        stage_state=evaluation.stage_state,
        world=world,
    )
    learner, control = build_learner(parts, policy, state, trial), TrainerControl()
    counts = loader.num_examples, num_steps_per_epoch
    args = Context(
        *(section, policy.module, learner, section.folder, *counts),
        processing_class=parts.codec.tokenizer,
        train_dataloader=DataView(
            columns.data.whole, section.global_batch_size, num_steps_per_epoch
        ),
        eval_dataloader=DataView.of(
            {name: each.examples for name, each in columns.evals.items()}, memory.forward_size
        ),
        shown=parts.arguments,
        added=state.added,
    )
    saves, is_compiled = parts.saves, parts.models.policy.section.compile
    saving = save_trigger(saves, saver, world)
    standard = standard_callbacks(section, saving, is_compiled=is_compiled, world=world)
    members = [*([] if trial else standard), *members]
    return Trainer(
        section=section,
        stage=stage,
        learners={POLICY: learner},
        windows=windows,
        evals=columns.evals,
        evaluation=evaluation,
        saver=saver,
        callbacks=Callbacks(args, state, control, members, world.progress),
        state=state,
        control=control,
        interval=LogAccumulator(state, policy.num_parameters),
        step_files=StepFiles(folder, world),
        world=world,
        judged_on=parts.judged_on(columns.data),
        save_steps=saves.save_steps,
        feeder=feeder,
    )
