"""A real pretrained model and real datasets: loss falls, everything opens everywhere."""

import math

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import surefoot
from project import losses

DATA = {
    "alpaca_en_demo": {"template": "alpaca"},
    "glaive_toolcall_en_demo": {"template": "default"},
    "c4_demo": {},
}
METHODS = {"full": "full", "freeze": {"freeze": {"num_layers": 2}}, "lora": {"lora": {"rank": 8}}}
# The two ways to template a dataset; the other pairs of dataset and method are proofs.
CASES = [
    ("sft", "alpaca_en_demo", "full"),
    pytest.param("sft", "glaive_toolcall_en_demo", "lora", marks=pytest.mark.proof),
    pytest.param("pt", "c4_demo", "freeze", marks=pytest.mark.proof),
    pytest.param("pt", "c4_demo", "full", marks=pytest.mark.proof),
    pytest.param("pt", "c4_demo", "lora", marks=pytest.mark.proof),
    pytest.param("sft", "alpaca_en_demo", "freeze", marks=pytest.mark.proof),
    pytest.param("sft", "alpaca_en_demo", "lora", marks=pytest.mark.proof),
    pytest.param("sft", "glaive_toolcall_en_demo", "full", marks=pytest.mark.proof),
]


@pytest.mark.parametrize(("stage", "dataset", "method"), CASES)
def test_training_on_real_input(stage, dataset, method, shared, tmp_path):
    model = shared / "models" / "stories260k"
    run = tmp_path / "run"
    learning_rate = 3e-3 if method == "lora" else 1e-3
    surefoot.train(
        {
            "model": {"path": str(model)},
            "data": {
                "dataset_dir": str(shared / "data"),
                "datasets": [dataset],
                "cutoff_len": 192,
                "max_samples": 60,
                "val_size": 6,
                **DATA[dataset],
            },
            "method": METHODS[method],
            "stage": stage,
            "train": {
                "output_dir": str(run),
                "max_steps": 16,
                "global_batch_size": 8,
                "log_steps": 4,
                "eval_steps": 8,
            },
            "optim": {"adamw": {"learning_rate": learning_rate, "warmup_steps": 3}},
            "checkpoint": {"save_steps": 8},
        }
    )
    course = list(losses(run).values())
    assert all(map(math.isfinite, course))
    assert course[-1] < course[0] - 0.2
    newest = run / "checkpoint-16"
    opened = opens_everywhere(newest, model, is_adapter=method == "lora")
    tokenizer = AutoTokenizer.from_pretrained(newest)
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
    assert torch.isfinite(opened(input_ids=ids).logits).all()


def opens_everywhere(folder, model, *, is_adapter):
    if not is_adapter:
        return AutoModelForCausalLM.from_pretrained(folder)
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder)
    assert any(p.abs().sum() > 0 for n, p in opened.named_parameters() if "lora_B" in n)
    return opened


@pytest.mark.proof
def test_the_logits_of_a_checkpoint_are_those_of_the_model_that_was_trained(shared, tmp_path):
    from surefoot.recipe.recipe import read
    from surefoot.run.training_run import build

    recipe = read(
        {
            "model": {"path": str(shared / "models" / "stories260k")},
            "data": {
                "dataset_dir": str(shared / "data"),
                "datasets": ["c4_demo"],
                "max_samples": 20,
                "cutoff_len": 128,
            },
            "stage": "pt",
            "train": {"output_dir": str(tmp_path / "run"), "max_steps": 3},
        }
    )
    trainer = build(recipe)
    trainer.fit()
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-3")
    ids = torch.arange(3, 40)[None]
    policy = trainer.policy.module.eval()
    policy.set_attn_implementation("sdpa")
    assert torch.equal(opened(input_ids=ids).logits, policy(input_ids=ids).logits)
