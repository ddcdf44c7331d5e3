"""Which weights learn under each method."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

import tiny
from surefoot.errors import RecipeError
from surefoot.methods import Freeze, Full, LoRA


def learning(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_full_tunes_every_weight():
    model = tiny.model().requires_grad_(False)
    assert learning(Full().apply(model)) == {name for name, _ in model.named_parameters()}


def test_freeze_tunes_the_last_or_the_first_layers():
    last, first = (
        Freeze(num_layers=2).apply(tiny.model()),
        Freeze(num_layers=-1).apply(tiny.model()),
    )
    assert {name.split(".")[2] for name in learning(last)} == {"1", "2"}
    assert {name.split(".")[2] for name in learning(first)} == {"0"}
    assert all(name.startswith("model.layers.") for name in learning(last) | learning(first))


def test_freeze_tunes_named_modules_inside_and_outside_the_layers():
    method = Freeze(num_layers=1, modules=("mlp",), extra_modules=("norm", "lm_head"))
    assert learning(method.apply(tiny.model())) == {
        "model.layers.2.mlp.gate_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.2.mlp.down_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    }


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (Freeze(num_layers=9), "num_layers: expected at most 3, the layers of the model, got 9"),
        (Freeze(modules=("mpl",)), "mlp"),
        (Freeze(extra_modules=("head",)), "lm_head"),
        (LoRA(targets=("q_prj",)), "q_proj"),
        (LoRA(modules_to_save=("head",)), "head"),
    ],
)
def test_a_module_that_is_not_there_is_named_with_those_that_are(method, words):
    with pytest.raises(RecipeError, match=words):
        method.apply(tiny.model())


@pytest.mark.parametrize("options", [{}, {"rslora": True}, {"dora": True}, {"dropout": 0.1}])
def test_lora_is_what_peft_makes_of_the_same_settings(options):
    names = {"rslora": "use_rslora", "dora": "use_dora", "dropout": "lora_dropout"}
    torch.manual_seed(3)
    found = LoRA(rank=4, alpha=12, **options).apply(tiny.model())
    config = LoraConfig(
        r=4,
        lora_alpha=12,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        **{names[name]: value for name, value in options.items()},
    )
    torch.manual_seed(3)
    expected = get_peft_model(tiny.model(), config)
    # both draw from the same generator after the model is built
    assert learning(found) == learning(expected)
    assert {n: p.shape for n, p in found.named_parameters()} == {
        n: p.shape for n, p in expected.named_parameters()
    }
    scales = [
        {name: m.scaling for name, m in model.named_modules() if isinstance(m, LoraLayer)}
        for model in (found, expected)
    ]
    assert scales[0] == scales[1] != {}


def test_alpha_is_twice_the_rank_unless_it_is_said():
    assert LoRA(rank=6).apply(tiny.model()).peft_config["default"].lora_alpha == 12
