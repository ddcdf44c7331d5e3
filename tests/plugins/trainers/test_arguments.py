"""The Trainer's arguments mean what the recipe says: its own scheduler is asked."""

from dataclasses import replace

import pytest
import torch
from transformers import Trainer, TrainingArguments

from surefoot.optim._variants.adamw import AdamW
from surefoot.plugins.trainers.to_trainer import training_arguments
from surefoot.recipe.recipe import read
from surefoot.stages import SFT

TOTAL = 20
RECIPE = read(
    {
        "model": {"path": "."},
        "data": {"datasets": ["a"]},
        "stage": "sft",
        "train": {"output_dir": "run", "global_batch_size": 8, "micro_batch_size": 2, "seed": 7},
    }
)


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "cosine"},
        {"schedule": "cosine", "min_lr_ratio": 0.1},
        {"schedule": "linear"},
        {"schedule": "linear", "min_lr_ratio": 0.25},
        {"schedule": "constant"},
        {"schedule": "wsd", "decay_ratio": 0.3, "min_lr_ratio": 0.05},
        {"schedule": "wsd_cosine", "decay_ratio": 0.3, "min_lr_ratio": 0.05},
        {"schedule": "inverse_sqrt"},
    ],
    ids=lambda s: "-".join(map(str, s.values())),
)
def test_the_schedules_agree_after_the_warm_up(settings, warmup, tmp_path):
    optim = AdamW(learning_rate=0.01, warmup_steps=warmup, **settings)
    arguments = training_arguments(replace(RECIPE, optim=optim), TOTAL)
    trainer = Trainer(
        model=torch.nn.Linear(2, 2),
        args=TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to="none", **arguments
        ),
    )
    trainer.create_optimizer_and_scheduler(TOTAL)
    schedule = optim.schedule_over(TOTAL)
    for step in range(TOTAL):
        if step >= warmup:
            ours = optim.learning_rate * schedule.factor(step)
            assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(ours, abs=1e-12), step
        trainer.optimizer.step()
        trainer.lr_scheduler.step()


def test_batches_precision_and_optimizer_are_the_recipes(tmp_path):
    optim = AdamW(learning_rate=0.01, beta1=0.8, beta2=0.95, epsilon=1e-6, weight_decay=0.3)
    train = replace(RECIPE.train, precision="bf16", max_grad_norm=0.5)
    recipe = replace(RECIPE, optim=optim, train=train)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, **training_arguments(recipe, TOTAL)
    )
    assert arguments.max_steps == TOTAL
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (2, 4)
    assert (arguments.max_grad_norm, arguments.seed, arguments.bf16) == (0.5, 7, True)
    trainer = Trainer(model=torch.nn.Linear(2, 2), args=arguments)
    group = trainer.create_optimizer().param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.01, (0.8, 0.95), 1e-6)
    assert group["weight_decay"] == 0.3


def test_smoothed_labels_are_the_trainers():
    recipe = replace(RECIPE, stage=SFT(label_smoothing_factor=0.1))
    assert training_arguments(recipe, TOTAL)["label_smoothing_factor"] == 0.1
