"""Which number a parameter has, by the Trainer itself."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

import tiny
from surefoot.plugins.trainers.trainer_folder import (
    moments_by_name,
    moments_by_number,
    trainer_groups,
)

WHERE = Path("optimizer.pt")


def their_optimizer(model, tmp_path):
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, weight_decay=0.1, report_to="none"
    )
    return Trainer(model=model, args=arguments).create_optimizer()


def wrapped(kind, **settings):
    return get_peft_model(
        tiny.model(kind), LoraConfig(r=2, target_modules="all-linear", **settings)
    )


MODELS = {
    **{kind: lambda kind=kind: tiny.model(kind) for kind in tiny.KINDS},
    "lora": lambda: wrapped("llama"),
    "dora": lambda: wrapped("qwen3", use_dora=True, modules_to_save=["lm_head", "norm"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_moment_of_the_trainer_finds_its_parameter_and_its_way_back(name, tmp_path):
    model = MODELS[name]()
    optimizer = their_optimizer(model, tmp_path)
    for i, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        parameter.grad = torch.full_like(parameter, i + 1)
    optimizer.step()
    saved = optimizer.state_dict()
    found = moments_by_name(saved, model, WHERE)
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            expected = optimizer.state[parameter]
            assert all(torch.equal(found[parameter_name][key], expected[key]) for key in expected)
    back = moments_by_number(found, trainer_groups(model), [{}, {}])
    assert back["state"].keys() == saved["state"].keys()
    assert [g["params"] for g in back["param_groups"]] == [
        g["params"] for g in saved["param_groups"]
    ]


def adamw(groups):
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=0.1)
    for group in groups:
        for parameter in group:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_a_trainer_of_transformers_4_let_norms_decay():
    model = tiny.model("qwen2")
    named = dict(model.named_parameters())
    groups = [
        [p for n, p in named.items() if ("bias" in n) == is_bias] for is_bias in (False, True)
    ]
    optimizer = adamw(groups)
    found = moments_by_name(optimizer.state_dict(), model, WHERE)
    for name, parameter in named.items():
        assert torch.equal(found[name]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_an_optimizer_of_the_users_own_in_one_group_is_understood():
    model = tiny.model()
    optimizer = adamw([list(model.parameters())])
    found = moments_by_name(optimizer.state_dict(), model, WHERE)
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name]["exp_avg_sq"], optimizer.state[parameter]["exp_avg_sq"])
