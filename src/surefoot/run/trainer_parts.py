"""The trainer of a run, from a policy that is ready and the data with its columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..batch import StepRunner
from ..data.text.codec import Codec
from ..model.precision import LossScaler, choose
from ..model.pretrained import companions
from ..model.seeding import derive
from ..network.network import Network
from ..parallel.world import World
from ..recipe.recipe import Recipe, dump
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
from .auxiliary import Ahead

Around = Callable[[StepRunner], StepRunner]


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
