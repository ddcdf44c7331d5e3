"""Hugging Face's own Trainer on the examples, batches and settings of a recipe of ours."""

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_callback import TrainerCallback

from folders import save_data, save_model, save_recipe
from surefoot.plugins.trainers.to_trainer import training_arguments
from surefoot.recipe.recipe import load
from surefoot.run.training_run import build

STEPS, HALF = 8, 4  # of a whole run, and where to switch; six steps are an epoch


def recipe_in(folder, *overrides, kind="llama", **sections):
    """22 examples in order, four a step, two at a time; an epoch ends in a short step."""
    content = {
        "data": {"val_size": 0, "shuffle": False, "packing": False, "cutoff_len": 64},
        "train": {"max_steps": STEPS, "eval_steps": None, "log_steps": 1},
        "optim": {"adamw": {"learning_rate": 0.003, "weight_decay": 0.1}},
        "checkpoint": {"save_steps": HALF, "keep": None},
    }
    for name, fields in sections.items():
        both = isinstance(fields, dict) and isinstance(content.get(name), dict)
        content[name] = {**content[name], **fields} if both else fields
    rows = [{"instruction": f"{i}+{i % 3}?", "output": f"{i + i % 3}"} for i in range(22)]
    save_model(folder / "model", kind)
    save_data(folder / "data", rows=rows)
    return load(save_recipe(folder, **content), overrides)


def collate(features):
    longest = max(len(f["input_ids"]) for f in features)
    pad = lambda row, value: [*row, *[value] * (longest - len(row))]  # noqa: E731
    return {
        "input_ids": torch.tensor([pad(f["input_ids"], 0) for f in features]),
        "labels": torch.tensor([pad(f["labels"], -100) for f in features]),
        "attention_mask": torch.tensor([pad([1] * len(f["input_ids"]), 0) for f in features]),
    }


class Losses(TrainerCallback):
    def __init__(self):
        self.of = {}

    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            self.of[state.global_step] = logs["loss"]


class StopAfter(TrainerCallback):
    """Saves step ``step`` and stops there, as a user who switches would."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop |= state.global_step == self.step


def policy_of(recipe, adapter=None):
    model = AutoModelForCausalLM.from_pretrained(recipe.model.path)
    if adapter is not None:
        return PeftModel.from_pretrained(model, adapter, is_trainable=True)
    return model


def their_trainer(recipe, folder, *callbacks, model=None, eval_dataset=None, **changes):
    examples = build(recipe).windows.loader.order.examples
    items = [
        {"input_ids": list(map(int, e["input_ids"])), "labels": list(map(int, e["labels"]))}
        for e in (examples[i] for i in range(len(examples)))
    ]
    arguments = training_arguments(recipe, recipe.train.max_steps)
    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_steps": HALF,
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        **arguments,
        **changes,
    }
    return Trainer(
        model=policy_of(recipe) if model is None else model,
        args=TrainingArguments(**settings),
        train_dataset=items,
        eval_dataset=eval_dataset,
        data_collator=collate,
        callbacks=list(callbacks),
    )


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def furthest(a, b):
    """The largest difference of any weight."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)
