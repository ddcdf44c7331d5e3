"""A run of Hugging Face's own Trainer with our checkpoints, on a tiny model with dropout."""

import functools
import random
import tempfile

import numpy as np
import torch
from theirs import StopAfter, collate
from transformers import Trainer, TrainerCallback, TrainingArguments

import tiny
from surefoot.plugins.trainers.callback import SurefootCheckpoints

SAVE_STEPS = 3


def examples(count=13, seed=5):
    """Of several lengths, so that the order of the data is seen in every loss."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(4, 12, count)
    rows = [generator.integers(3, 64, length).tolist() for length in lengths]
    return [{"input_ids": row, "labels": list(row)} for row in rows]


class Drawing(TrainerCallback):
    """Draws from every generator at every step, as a method that samples would."""

    def on_substep_end(self, args, state, control, **kwargs):
        torch.rand(1), np.random.rand(), random.random()

    on_pre_optimizer_step = on_substep_end


def trainer(
    folder, *, model=None, callbacks=(), keep=None, stop=None, save_steps=SAVE_STEPS, **settings
):
    """A Trainer and its checkpoints. 13 examples in batches of 2: 7 steps an epoch, one ragged."""
    defaults = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "warmup_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 1,
    }
    args = TrainingArguments(output_dir=str(folder), **{**defaults, **settings})
    stops = [StopAfter(stop)] if stop else []
    built = Trainer(
        model=(tiny.model(attention_dropout=0.2) if model is None else model).train(),
        args=args,
        train_dataset=examples(),
        eval_dataset=examples(5, seed=6),
        data_collator=collate,
        callbacks=[Drawing(), *stops, *callbacks],
    )
    return built, SurefootCheckpoints(built, save_steps=save_steps, keep=keep)


def uninterrupted(folder, **settings):
    """A run of the Trainer alone."""
    built, checkpoints = trainer(folder, **settings)
    built.remove_callback(checkpoints)
    built.train()
    return built


@functools.cache
def whole(**settings):
    """An uninterrupted run of these settings, made once; nobody reads its folder."""
    with tempfile.TemporaryDirectory() as folder:
        return uninterrupted(folder, **settings)


def train(folder, resume=True, **settings):
    built, checkpoints = trainer(folder, **settings)
    built.train(resume_from_checkpoint=checkpoints.newest() if resume else None)
    return built
