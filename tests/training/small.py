"""A whole trainer on a tiny random model and a few examples, without recipe or tokenizer."""

from dataclasses import replace

import numpy as np
import torch

import tiny
from surefoot.checkpoint.reading.loading import load
from surefoot.checkpoint.section import CheckpointSection
from surefoot.data.order.full_shuffle import FullShuffle
from surefoot.data.order.loader import Loader
from surefoot.data.order.micro_batches import Batching
from surefoot.data.text.collation import collate
from surefoot.methods.full import Full
from surefoot.model.attention import packed
from surefoot.model.head import outputs
from surefoot.model.precision import LossScaler, autocast
from surefoot.model.pretrained.weights import AdapterWeights, FullWeights
from surefoot.model.seeding import seed_everything
from surefoot.optim.adamw import AdamW
from surefoot.optim.state import NamedState
from surefoot.parallel.model_runner import plain
from surefoot.stages.sft import SFT
from surefoot.training.callback import Callbacks, Context, TrainerCallback
from surefoot.training.log_accumulator import LogAccumulator
from surefoot.training.saver import Saver
from surefoot.training.section import TrainSection
from surefoot.training.stage import Models
from surefoot.training.state import TrainerControl, TrainerState
from surefoot.training.step import Step
from surefoot.training.trainer import Trainer
from surefoot.training.triggers import IntervalCallback, Trigger


class Items(list):
    fingerprint = "the same"

    @property
    def lengths(self):
        return np.array([len(item["input_ids"]) for item in self])

    def lengths_of(self, items):
        return self.lengths[items]


def examples(count=14, seed=5):
    random = np.random.default_rng(seed)
    items = Items()
    for _ in range(count):
        prompt, answer = random.integers(3, 64, 4), random.integers(3, 64, random.integers(1, 6))
        ids = [*prompt.tolist(), *answer.tolist()]
        items.append({"input_ids": ids, "labels": [-100] * 4 + answer.tolist()})
    return items


class Seen(TrainerCallback):
    """Remembers every log and the names of all events."""

    def __init__(self):
        self.logs, self.events = [], []

    def on_log(self, args, state, control, logs):
        self.logs.append(dict(logs))

    def __getattribute__(self, name):
        if name.startswith("on_"):
            object.__getattribute__(self, "events").append(name)
        return object.__getattribute__(self, name)

    @property
    def losses(self):
        return {log["step"]: log["loss"] for log in self.logs if "loss" in log}


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
    prefetch=None,
    **section,
):
    defaults = {"max_steps": 8, "log_steps": 1, "global_batch_size": 4, "micro_batch_size": 2}
    section = TrainSection(output_dir=folder, **{**defaults, **section})
    seed_everything(section.seed)
    inner = tiny.model(attention_dropout=0.1) if model is None else model
    if packing:
        packed.use_packed(inner)
    method = method or Full()
    seed_everything(section.seed, 1)
    policy = method.apply(inner)
    make = lambda features: collate(features, packing=packing)  # noqa: E731
    loader = Loader(
        FullShuffle(items or examples(), section.seed),
        Batching(make, micro_batch_size=section.micro_batch_size, packing=packing),
        global_batch_size=section.global_batch_size,
        prefetch=prefetch,
    )
    state = TrainerState(max_steps=section.max_steps, train_batch_size=section.micro_batch_size)
    control = TrainerControl()
    optim = optim or AdamW(learning_rate=5e-3, weight_decay=0.1)
    optimizer = optim.build([(n, p) for n, p in policy.named_parameters() if p.requires_grad])

    def forward(batch, needs=("logps",)):
        with autocast(precision, batch.input_ids.device):
            return outputs.compute(policy, batch, needs)

    checkpoint = CheckpointSection(save_steps=save_steps, keep=keep)
    flow = IntervalCallback(
        Trigger(section.log_steps),
        Trigger(section.eval_steps, section.eval_minutes, section.eval_epoch),
        Trigger(save_steps),
    )
    context = Context(
        section, policy, optimizer, folder, loader.num_examples, loader.steps_per_epoch
    )
    return Trainer(
        section=section,
        stage=SFT(),
        models=Models(policy),
        weights=AdapterWeights(policy) if method.kind == "adapter" else FullWeights(inner),
        optimizer_state=NamedState(optimizer),
        step=Step(
            optimizer,
            optim.schedule_over(section.max_steps),
            plain(forward, torch.device("cpu")),
            section.max_grad_norm,
            LossScaler(enabled=precision == "fp16"),
        ),
        forward=lambda batch: forward(batch, ("logps", "predictions")),
        loader=loader,
        evals={"": [make(list(evals))]} if evals else {},
        saver=Saver(
            output_dir=folder,
            section=checkpoint,
            kind=method.kind,
            companions={},
            steps={"log_steps": 1, "eval_steps": section.eval_steps, "save_steps": save_steps},
        ),
        callbacks=Callbacks(context, state, control, [flow, *members]),
        state=state,
        control=control,
        interval=LogAccumulator(state, 1000),
    )


def resume(built, folder):
    load(folder, built.states)
    built.saver = replace(built.saver, resumed_from=folder)
    return built


def weights(built):
    return {name: p.detach().clone() for name, p in built.models.policy.state_dict().items()}


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
