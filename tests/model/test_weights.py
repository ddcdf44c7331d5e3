"""Weights as states: files open with from_pretrained, and come back into a model that exists."""

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import tiny
from surefoot.checkpoint.loading import load
from surefoot.checkpoint.saving.preparation import save
from surefoot.errors import CheckpointError
from surefoot.methods import LoRA
from surefoot.model.weights import AdapterWeights, FullWeights, adapter_files, model_files

IDS = torch.arange(3, 20)[None]


def mixtral(seed=0):
    """Experts are fused in memory and separate in files."""
    torch.manual_seed(seed)
    config = MixtralConfig(**tiny.SIZES, num_local_experts=4, num_experts_per_tok=2)
    return MixtralForCausalLM(config).eval()


MAKE = {kind: lambda kind=kind: tiny.model(kind) for kind in tiny.KINDS} | {"mixtral": mixtral}


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("kind", MAKE)
def test_a_full_checkpoint_opens_with_from_pretrained_and_loads_back(kind, tmp_path):
    model = MAKE[kind]()
    companions = model_files(model, tmp_path, (2,))
    folder = save(tmp_path, 1, {"model": FullWeights(model)}, kind="full", companions=companions)
    opened, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation=model.config._attn_implementation
    )
    assert not any(info.values()), info
    assert torch.equal(logits(opened), logits(model))

    other = MAKE[kind]()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    load(folder, {"model": FullWeights(other)})
    assert torch.equal(logits(other), logits(model))


@pytest.mark.parametrize("kind", ["qwen2", "mixtral"])
def test_the_names_are_those_transformers_itself_saves(kind, tmp_path):
    model = MAKE[kind]()
    model.save_pretrained(tmp_path)
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(FullWeights(model).state_dict()) == set(file.keys())


def test_weights_of_another_model_are_refused_and_change_nothing(tmp_path):
    folder = save(tmp_path, 1, {"model": FullWeights(tiny.model("llama"))}, kind="full")
    other = tiny.model("qwen3")
    before = logits(other)
    with pytest.raises(CheckpointError):
        load(folder, {"model": FullWeights(other)})
    assert torch.equal(logits(other), before)


@pytest.mark.parametrize(
    "options",
    [{}, {"dora": True}, {"rslora": True}, {"modules_to_save": ("embed_tokens", "lm_head")}],
)
def test_an_adapter_checkpoint_opens_with_peft_and_loads_back(options, tmp_path):
    made, other = (LoRA(rank=2, **options).apply(tiny.model()).eval() for _ in range(2))
    with torch.no_grad():
        for parameter in (p for p in made.parameters() if p.requires_grad):
            parameter.add_(torch.rand(parameter.shape))
    folder = save(
        tmp_path, 1, {"model": AdapterWeights(made)}, kind="adapter", companions=adapter_files(made)
    )
    opened = PeftModel.from_pretrained(tiny.model(), folder).eval()
    assert torch.equal(logits(opened), logits(made))
    load(folder, {"model": AdapterWeights(other)})
    assert torch.equal(logits(other), logits(made))


def test_an_adapter_of_another_rank_is_refused(tmp_path):
    made, other = LoRA(rank=2).apply(tiny.model()), LoRA(rank=4).apply(tiny.model())
    folder = save(tmp_path, 1, {"model": AdapterWeights(made)}, kind="adapter")
    with pytest.raises(CheckpointError):
        load(folder, {"model": AdapterWeights(other)})
