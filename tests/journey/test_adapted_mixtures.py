"""LoRA on a mixture from the recipe to the exported model; callbacks that write once."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import folders
import mixtures
import surefoot
from surefoot.use import export, open_model

KINDS = ["deepseek_v3", pytest.param("jetmoe", marks=pytest.mark.proof)]
IDS = torch.arange(60, 92)[None]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def recipe_in(folder, kind, **sections):
    known = folders.tokenizer()
    sizes = {"vocab_size": len(known), "eos_token_id": known.eos_token_id}
    mixtures.model(kind, **sizes).save_pretrained(folder / "model")
    known.save_pretrained(folder / "model")
    folders.save_data(folder / "data")
    settings = {
        "optim": {"adamw": {"learning_rate": 0.03, "schedule": "constant"}},
        "method": {"lora": {"rank": 2}},
    }
    return folders.save_recipe(folder, **{**settings, **sections})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packing", [True, pytest.param(False, marks=pytest.mark.proof)])
def test_a_run_on_experts_resumes_bitwise_and_exports(kind, packing, tmp_path, caplog):
    recipe = recipe_in(tmp_path, kind, data={"packing": packing})
    caplog.set_level(logging.INFO, logger="surefoot")
    surefoot.train(recipe)
    experts = "mlp: input_linear" if kind == "jetmoe" else "mlp.experts"
    (row,) = [line for line in caplog.text.splitlines() if line.startswith(f"  {experts}")]
    assert row.endswith("yes, by an adapter")
    surefoot.train(recipe, **{"train.output_dir": str(tmp_path / "cut"), "train.max_steps": 2})
    surefoot.train(recipe, **{"train.output_dir": str(tmp_path / "cut")})
    whole, cut = (
        load_file(tmp_path / name / "checkpoint-4" / "adapter_model.safetensors")
        for name in ("run", "cut")
    )
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    out = export(tmp_path / "run", tmp_path / "out")
    expected = open_model(tmp_path / "run").model(IDS).logits
    found = AutoModelForCausalLM.from_pretrained(out)(IDS).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert json.loads((out / "config.json").read_text())["model_type"] == kind
