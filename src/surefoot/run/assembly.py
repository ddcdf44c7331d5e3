"""A run from its recipe, in reading order: ``build``, and below it each part, in that order."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..checkpoint.disk.folder import tokenizer_of
from ..checkpoint.loading import load as load_checkpoint
from ..checkpoint.saving.preparation import WriterGroup
from ..checkpoint.saving.saver import AsyncSaver, SaveListener
from ..data.text.codec import Codec
from ..model import products, weights
from ..model.base_identity import BaseModel
from ..model.numerics import keep_freed_memory, seed_everything, use_deterministic_kernels
from ..model.tokenizer import with_eos
from ..network.network import Network
from ..parallel.progress import DATA, TRAINING
from ..parallel.world import ALONE, World
from ..recipe.files import RUN_RECIPE
from ..recipe.recipe import Recipe, dump
from ..recipe.recipe_data import settled
from ..training.arguments import Context
from ..training.callback import Callbacks, TrainerControl, TrainerState
from ..training.callbacks.launches import NAME as LAUNCHES
from ..training.callbacks.metric_files import METRICS, TENSORBOARD
from ..training.control import LogAccumulator, Trigger, standard_callbacks
from ..training.kept_rollouts import KeptRollouts
from ..training.out_of_memory import MemoryGuard
from ..training.stage import POLICY
from ..training.trainer import Trainer
from ..training.views import DataView
from ..training.windows import Windows, num_steps
from . import _data_loading as data_loading
from .code_files import check_code, code_of
from .contexts import RunColumns, build_evaluation, picture_probes, precompute, served_policy
from .foreign_resume import ForeignTrainer, detect_trainer
from .from_python import AS_IN_THE_RECIPE, StageParts
from .models import check_models, find_bases, open_auxiliary
from .policy import (
    Around,
    build_codec,
    build_learner,
    compare_prepared,
    end_with_responses,
    open_policy,
    settle_packing,
)
from .trainer_names import argument_values

logger = logging.getLogger(__name__)


NO_CODE: Mapping[str, bytes] = {}


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run is resumed from."""

    folder: Path
    writer: ForeignTrainer | None  # None: Surefoot
    trust_pickle: bool = False
    is_verified: bool = False  # whether every byte of it was checked a moment ago

    @classmethod
    def of(
        cls, folder: Path, world: World, *, trust_pickle: bool = False, is_verified: bool = False
    ) -> Start:
        """The checkpoint in ``folder``, by Surefoot or a trainer that is recognized."""
        writer = detect_trainer(folder, trust_pickle=trust_pickle, pp=world.pp)
        return cls(folder, writer, trust_pickle, is_verified)

    @property
    def has_base(self) -> bool:
        """Whether all that the method may save of the base model is in it."""
        return self.writer is None or not self.writer.needs_base

    def restore(self, trainer: Trainer, base: Path) -> None:
        """Give ``trainer`` the states of the checkpoint."""
        folder, trust = self.folder, self.trust_pickle
        if self.writer is not None:
            self.writer.load(folder, trainer, base=base, trust_pickle=trust)
        else:
            load_checkpoint(folder, trainer.states, is_verified=self.is_verified)
        trainer.policy.trained.check(trainer.state.global_step)
        logger.info("resuming from %s at step %d", folder.name, trainer.state.global_step)


def build(
    recipe: Recipe,
    *,
    callbacks: Sequence[object] = (),
    resume: Path | Start | None = None,
    world: World = ALONE,
    listeners: Sequence[SaveListener] = (),
    trial: Around | None = None,
    parts: StageParts = AS_IN_THE_RECIPE,
) -> Trainer:
    """The Trainer of a recipe, with the states of the checkpoint ``resume`` if one is given, and
    ``parts`` in place of the stage's. ``trial`` is for measurements of speed: it wraps forward and
    backward, auxiliary models compute nothing, and there are no callbacks except the given ones."""
    start = Start.of(resume, world) if isinstance(resume, Path) else resume
    use_deterministic_kernels(recipe.train.deterministic)
    products.use_chosen()
    # The C library gave large blocks back to the system and took them again page by page: 300,000
    # pages in eight steps of a small model.
    keep_freed_memory()
    code = code_of(recipe, parts)
    bases = find_bases(recipe, None if start is None or start.writer is not None else start.folder)
    base = bases.policy.folder
    written = settled(recipe, base)  # by its checkpoints
    recipe = replace(written, stage=parts.of(written.stage))
    codec = build_codec(recipe, base)
    if start is None:
        # Truncated weights and tokens without embeddings were once found after hours of encoding.
        check_models(recipe, world, codec)
    elif start.writer is not None:
        world.on_main(partial(start.writer.check_weights, start.folder, base))
    seed_everything(recipe.train.seed)
    code |= bases.record() if trial is None and world.is_main else {}
    data, feeder = data_loading.open_data(recipe, codec, base, world)
    if trial is None and world.is_main:
        data_loading.log_example(codec, data)
    longest = data_loading.longest_document(recipe, data)
    probes = picture_probes(recipe, codec) if data.has_pictures else ()
    saved = start is not None and start.has_base and recipe.method.saves_base_model

    def opened(needs_start: bool) -> Network:
        is_new = start is None or needs_start
        is_read = is_new or not saved  # if no checkpoint has all values, or they are needed before
        tokenizer = codec.tokenizer
        given = {"is_read": is_read, "is_new": is_new}
        return open_policy(recipe, base, tokenizer, world, longest=longest, probes=probes, **given)

    beside = partial(
        open_auxiliary, recipe, codec=codec, world=world, longest=longest, folders=bases.folders
    )
    columns, networks = precompute(
        recipe, data, bases.folders, codec, world, opened, beside, is_blank=trial is not None
    )
    policy = networks[POLICY]
    saver = build_saver(written, policy, codec, bases.policy, code, start, listeners)
    end_with_responses(policy, codec)  # the files beside the weights have their own
    saves = recipe.checkpoint
    saving = Trigger(saves.save_steps, saves.save_minutes, saves.save_epoch)
    is_compiled = recipe.model.compile
    standard = standard_callbacks(recipe.train, saving, is_compiled=is_compiled, world=world)
    members = [*([] if trial else standard), *callbacks]
    if is_compiled:
        world.progress.allow_long(TRAINING)
    if recipe.stage.max_new_tokens:
        world.progress.allow_long(DATA)  # responses may be much longer than those before
    trainer = build_trainer(recipe, codec, networks, columns, saver, members, feeder, trial=trial)
    if start is not None:
        start.restore(trainer, base)
        check_code(code, start.folder)
    trainer.windows.memory.recall(trainer.state.global_step)
    settle_packing(recipe, trainer, policy, is_resumed=start is not None)
    compare_prepared(trainer.state.kernels, policy)
    trainer.callbacks.emit("on_init_end")
    return trainer


def build_saver(
    recipe: Recipe,
    policy: Network,
    codec: Codec,
    base: BaseModel,
    code: Mapping[str, bytes] = NO_CODE,
    start: Start | None = None,
    listeners: Sequence[SaveListener] = (),
) -> AsyncSaver:
    """The saver of a run: the folder of its checkpoints, and their companions, ``code`` among
    them."""
    world = policy.world
    saved_tokenizer = tokenizer_of(Path(codec.tokenizer.name_or_path))
    files = {RUN_RECIPE: dump(recipe).encode()}
    tokenizer = with_eos(codec.tokenizer, recipe.model.eos_token)
    files |= weights.tokenizer_files(tokenizer, saved_tokenizer)
    files |= {} if codec.media is None else codec.media.processor.files
    files |= policy.weights.small_files(base.at_commit(), base.folder, codec.stop_token_ids)
    section = recipe.checkpoint
    return AsyncSaver(
        recipe.train.folder,
        keep=section.rule(),
        resumed_from=None if start is None else start.folder,
        is_foreign=start is not None and start.writer is not None,
        share=section.share_unchanged,
        in_background=section.async_save,
        max_shard_size=section.max_shard_size,
        greater_is_better=recipe.train.is_greater_better,
        on_error=section.on_save_error,
        has_lock=True,  # the run has locked its folder from the start
        writers=WriterGroup(
            section.layout_in(recipe.train.output_dir),
            world.rank,
            world.size,
            world.axes,
            world.gathered,
            world.from_main,
        ),
        listeners=listeners,
        beside=(METRICS, LAUNCHES, TENSORBOARD),
        kind=policy.weights.kind,
        companions={**files, **code},
        on_busy=section.on_save_busy,
    )


def build_trainer(
    recipe: Recipe,
    codec: Codec,
    networks: Mapping[str, Network],
    columns: RunColumns,
    saver: AsyncSaver,
    members: Sequence[object],
    feeder: AbstractContextManager[object],
    *,
    trial: Around | None = None,
) -> Trainer:
    """The loop over its parts; ``networks`` are the policy and those that stay beside it."""
    section, stage, policy = recipe.train, recipe.stage, networks[POLICY]
    world, folder = policy.world, None if trial else section.folder
    memory = replace(MemoryGuard.of(section, world), folder=folder)
    served = None if trial else served_policy(recipe, policy, saver, world)
    evaluation = replace(
        build_evaluation(recipe, codec, networks, world, memory, served), kept=KeptRollouts(folder)
    )
    loader = data_loading.build_loader(recipe, columns.data, evaluation.collation, world)
    windows = Windows(
        loader,
        stage,
        evaluation.context,
        columns.kept,
        section.seed,
        memory,
        stage_state=evaluation.stage_state,
    )
    max_steps = num_steps(section, windows.steps_per_epoch)
    state = TrainerState(
        max_steps=max_steps,
        num_train_epochs=section.num_epochs,
        train_batch_size=section.fixed_micro_batch_size,
        is_local_process_zero=world.is_local_main,
        is_world_process_zero=world.is_main,
        fitted=memory.sizes,
    )
    evaluation.version.state = state  # which its contexts read
    learner, control = build_learner(recipe, policy, state, trial), TrainerControl()
    counts = loader.num_examples, windows.steps_per_epoch
    args = Context(
        *(section, policy.module, learner, section.folder, *counts),
        processing_class=codec.tokenizer,
        train_dataloader=DataView(
            columns.data.whole, section.global_batch_size, windows.steps_per_epoch
        ),
        eval_dataloader=DataView.of(
            {name: each.examples for name, each in columns.evals.items()}, memory.forward_size
        ),
        shown=argument_values(recipe),
        added=state.added,
    )
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
        world=world,
        save_steps=recipe.checkpoint.save_steps,
        feeder=feeder,
    )
