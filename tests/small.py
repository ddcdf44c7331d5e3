"""A whole trainer on a tiny random model and a few examples, without recipe or tokenizer."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

import tiny
from surefoot.checkpoint.loading import load
from surefoot.checkpoint.saving.saver import AsyncSaver
from surefoot.checkpoint.section import CheckpointSection
from surefoot.data.order.loader import Loader, Shuffle
from surefoot.data.order.micro_batches import Batching, Collation
from surefoot.data.store.dataset import in_memory
from surefoot.data.text.collation import collate
from surefoot.methods import Full
from surefoot.model import isolation, packed_kernels
from surefoot.model.loading import device
from surefoot.model.numerics import LossScaler, seed_everything, use_deterministic_kernels
from surefoot.model.section import ModelSection
from surefoot.network.open import ON_THE_MESH, Draft, NetworkOptions, finish
from surefoot.optim._variants.adamw import AdamW
from surefoot.parallel.world import ALONE
from surefoot.stages import SFT
from surefoot.training.arguments import Context
from surefoot.training.callback import (
    EVENTS,
    Callbacks,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from surefoot.training.callbacks.step_files import StepFiles
from surefoot.training.control import IntervalCallback, LogAccumulator, Trigger
from surefoot.training.evaluation import Evaluation, EvaluationSet
from surefoot.training.out_of_memory import MemoryGuard
from surefoot.training.precompute import NOTHING
from surefoot.training.section import TrainSection
from surefoot.training.step import Learner, Step
from surefoot.training.trainer import Trainer
from surefoot.training.windows import Windows


def examples(count=14, seed=5):
    random = np.random.default_rng(seed)
    items = []
    for _ in range(count):
        prompt, answer = random.integers(3, 64, 4), random.integers(3, 64, random.integers(1, 6))
        ids = [*prompt.tolist(), *answer.tolist()]
        items.append({"input_ids": ids, "labels": [-100] * 4 + answer.tolist()})
    return items


class Seen(TrainerCallback):
    """Remembers every log and the names of all events."""

    def __init__(self):
        self.logs, self.events = [], []

    def note(self, event, logs=None):
        self.events.append(event)
        if event == "on_log":
            self.logs.append(dict(logs))

    @property
    def losses(self):
        return {log["step"]: log["loss"] for log in self.logs if "loss" in log}


def _noting(event):
    def method(self, args, state, control, logs=None, **parts):
        self.note(event, logs)

    return method


for _event in EVENTS:
    setattr(Seen, _event, _noting(_event))


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control):
        control.should_training_stop |= state.global_step == self.step


def trainer(
    folder,
    *members,
    method=None,
    model=None,
    items=None,
    evals=(),
    optim=None,
    save_steps=3,
    keep=None,
    precision="fp32",
    packing=True,
    attention=packed_kernels.BY_DOCUMENT,
    prefetch=None,
    **section,
):
    defaults = {"max_steps": 8, "log_steps": 1, "global_batch_size": 4, "micro_batch_size": 2}
    section = TrainSection(output_dir=folder, **{**defaults, **section})
    seed_everything(section.seed)
    if device().type == "cuda":
        use_deterministic_kernels(section.deterministic)
    inner = (tiny.model(attention_dropout=0.1) if model is None else model).to(device())
    if packing:
        isolation.use_packed(inner)
        packed_kernels.use(inner, attention)
    method = method or Full()
    seed_everything(section.seed, 1)
    policy = method.apply(inner)
    options = NetworkOptions(method=method, precision=precision)
    draft = Draft(folder, ModelSection(path="unused"), None, ALONE, options)
    draft.inner, draft.module = inner, policy
    network = finish(draft, ON_THE_MESH)
    stage, laid = SFT(), Collation(collate, packing)
    loader = Loader(
        Shuffle(in_memory(items or examples()), section.seed),
        Batching(laid, micro_batch_size=section.micro_batch_size),
        global_batch_size=section.global_batch_size,
        prefetch=prefetch,
    )
    state = TrainerState(max_steps=section.max_steps, train_batch_size=section.micro_batch_size)
    control = TrainerControl()
    optim = optim or AdamW(learning_rate=5e-3, weight_decay=0.1)
    trained = network.trained(optim)
    step = Step(
        trained.optimizer,
        optim.schedule_over(section.max_steps, state.reductions),
        partial(network.forward_backward, spec=stage.spec),
        section.max_grad_norm,
        LossScaler(enabled=precision == "fp16"),
    )
    learner = Learner(network, step, trained)
    flow = IntervalCallback(
        Trigger(section.log_steps),
        Trigger(section.eval_steps, section.eval_minutes, section.eval_epoch),
        Trigger(save_steps),
    )
    context = Context(section, policy, learner, folder, loader.num_examples, loader.steps_per_epoch)
    memory = MemoryGuard.of(section)
    memory.folder, memory.sizes = folder, state.fitted
    sizes = memory, section.global_batch_size
    return Trainer(
        section=section,
        stage=stage,
        learners={"policy": learner},
        windows=Windows(loader, stage, no_context, NOTHING, section.seed, memory),
        evals={"": EvaluationSet(list(evals), NOTHING)} if evals else {},
        evaluation=Evaluation(stage, network, no_context, laid, *sizes, ALONE),
        saver=AsyncSaver(folder, keep=keep, kind=network.weights.kind, has_lock=True),
        save_steps=save_steps,
        callbacks=Callbacks(context, state, control, [flow, *members]),
        state=state,
        control=control,
        interval=LogAccumulator(state, 1000),
        step_files=StepFiles(None, ALONE),
    )


def no_context(_place):
    """Stages that train on windows as loaded compute nothing."""
    return SimpleNamespace(recorded=())


def saving(built, **section):
    """The trainer with a saver as this ``checkpoint`` section of a recipe makes it."""
    found = CheckpointSection(**section)
    saver = replace(
        built.saver,
        keep=found.rule(),
        share=found.share_unchanged,
        in_background=found.async_save,
        on_error=found.on_save_error,
        on_busy=found.on_save_busy,
        writers=replace(built.saver.writers, layout=found.layout or "full"),
    )
    return replace(built, saver=saver)


def resume(built, folder):
    load(folder, built.states)
    built.windows.memory.recall(built.state.global_step)
    return replace(built, saver=replace(built.saver, resumed_from=folder))


def weights(built):
    return {name: p.detach().clone() for name, p in built.policy.module.state_dict().items()}


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
