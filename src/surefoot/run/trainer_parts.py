"""The trainer of a run, from a policy that is ready and the data with its columns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from ..batch import StepRunner
from ..data.text.codec import Codec
from ..model.seeding import derive
from ..network.network import Network
from ..recipe.recipe import Recipe
from ..training.callback import Callbacks, Context, TrainerCallback
from ..training.context import NetworkContext, collate_of
from ..training.control.log_accumulator import LogAccumulator
from ..training.evaluation import Evaluation
from ..training.saver import Saver
from ..training.stage import POLICY
from ..training.state import TrainerControl, TrainerState
from ..training.trainer import Trainer
from ..training.windows import Place, Windows, num_steps
from . import data_loading
from .auxiliary import Ahead
from .policy import Around, build_learner


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
