"""The trainer of a run, from a policy that is ready and the data with its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from ..data.text.codec import Codec
from ..network.network import Network
from ..recipe.recipe import Recipe
from ..training.callback import Callbacks, Context, TrainerCallback
from ..training.control.log_accumulator import LogAccumulator
from ..training.control.out_of_memory import MemoryGuard
from ..training.saver import Saver
from ..training.stage import POLICY
from ..training.state import TrainerControl, TrainerState
from ..training.trainer import Trainer
from ..training.windows import Windows, num_steps
from . import data_loading
from .auxiliary import Ahead
from .contexts import build_evaluation, served_policy
from .policy import Around, build_learner


def assemble(
    recipe: Recipe,
    codec: Codec,
    networks: Mapping[str, Network],
    ahead: Ahead,
    saver: Saver,
    members: Sequence[TrainerCallback] = (),
    feeder: AbstractContextManager[object] | None = None,
    *,
    trial: Around | None = None,
) -> Trainer:
    """Assemble the parts; ``networks`` by role are the policy and those that stay beside it."""
    section, stage, world = recipe.train, recipe.stage, ahead.world
    policy = networks[POLICY]
    memory = MemoryGuard.of(section, world)
    memory.folder = None if trial else section.folder
    served = None if trial else served_policy(recipe, policy, saver, world)
    evaluation = build_evaluation(recipe, codec, networks, world, memory, served)
    evaluation.kept.folder = None if trial else section.folder
    loader = data_loading.build_loader(recipe, ahead.data, evaluation.collate, world)
    windows = Windows(
        loader,
        stage,
        evaluation.context,
        ahead.kept,
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
    evaluation.version.state = state
    learner = build_learner(recipe, policy, max_steps, trial)
    control = TrainerControl()
    counts = loader.num_examples, windows.steps_per_epoch
    args = Context(section, policy.module, learner, section.folder, *counts)
    return Trainer(
        section=section,
        stage=stage,
        learners={POLICY: learner},
        windows=windows,
        evals=ahead.evals,
        evaluation=evaluation,
        saver=saver,
        callbacks=Callbacks(args, state, control, members),
        state=state,
        control=control,
        interval=LogAccumulator(state, policy.num_parameters),
        world=world,
        feeder=feeder or nullcontext(),
    )
