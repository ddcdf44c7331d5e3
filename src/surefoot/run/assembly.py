"""A run from its recipe, in reading order."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from .. import interchange
from ..checkpoint.background.saver import SaveListener
from ..checkpoint.reading.loading import load as load_checkpoint
from ..model.malloc import keep_freed_memory
from ..model.seeding import seed_everything, use_deterministic_kernels
from ..parallel.world import ALONE, World
from ..recipe.recipe import Recipe
from ..recipe.recipe_data import settled
from ..training.callback import TrainerCallback
from ..training.trainer import Trainer
from . import data_loading
from .auxiliary import open_ahead
from .base_models import find_bases
from .code_files import check_code, code_of
from .from_python.stages import AS_IN_THE_RECIPE, StageParts
from .policy import (
    Around,
    build_codec,
    check_early,
    end_with_responses,
    open_policy,
    settle_packing,
)
from .prepared_model import compare_prepared
from .recipe_callbacks import standard_callbacks
from .saving import build_saver
from .trainer_parts import assemble

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run is resumed from."""

    folder: Path
    writer: interchange.ForeignTrainer | None  # None: Surefoot
    trust_pickle: bool = False
    is_verified: bool = False  # whether every byte of it was checked a moment ago

    @classmethod
    def of(
        cls, folder: Path, world: World, *, trust_pickle: bool = False, is_verified: bool = False
    ) -> Start:
        """The checkpoint in ``folder``, by Surefoot or a trainer that is recognized."""
        writer = interchange.detect_trainer(folder, trust_pickle=trust_pickle, pp=world.pp)
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
    callbacks: Sequence[TrainerCallback] = (),
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
    keep_freed_memory()
    code = code_of(recipe, parts)
    bases = find_bases(recipe, None if start is None or start.writer is not None else start.folder)
    base = bases.policy.folder
    written = settled(recipe, base)  # by its checkpoints
    recipe = replace(written, stage=parts.of(written.stage))
    codec = build_codec(recipe, base)
    if start is None:
        world.on_main(partial(check_early, recipe, world, codec))
    seed_everything(recipe.train.seed)
    code |= bases.record() if trial is None and world.is_main else {}
    data, feeder = data_loading.open_data(recipe, codec, base, world)
    ahead = open_ahead(recipe, bases.folders, codec, data, world)
    if trial is not None:
        ahead.blank()
    ahead.run_without_policy()
    is_new = start is None or ahead.needs_start
    has_base = start is not None and start.has_base and recipe.method.saves_base_model
    is_read = is_new or not has_base  # if no checkpoint has all values, or they are needed before
    longest = data_loading.longest_document(recipe, data)
    policy = open_policy(
        recipe, base, codec.tokenizer, world, is_read=is_read, is_new=is_new, longest=longest
    )
    ahead.run(policy)
    ahead = ahead.with_windows(policy)
    saver = build_saver(written, policy, codec, bases.policy, world)
    end_with_responses(policy, codec)  # the files beside the weights have their own
    saver = replace(
        saver,
        resumed_from=None if start is None else start.folder,
        is_foreign=start is not None and start.writer is not None,
        companions={**saver.companions, **code},
        listeners=listeners,
    )
    members = [*([] if trial else standard_callbacks(recipe, world)), *callbacks]
    trainer = assemble(recipe, codec, policy, ahead, saver, members, feeder, trial=trial)
    if start is not None:
        start.restore(trainer, base)
        check_code(code, start.folder)
    trainer.windows.memory.recall(trainer.state.global_step)
    settle_packing(recipe, trainer, policy, is_resumed=start is not None)
    compare_prepared(trainer.state.kernels, policy)
    trainer.callbacks.emit("on_init_end")
    return trainer
