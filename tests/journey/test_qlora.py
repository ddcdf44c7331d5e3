"""A LoRA beside a base of 4 or 8 bits: it learns, goes on to the bit, and merges into the base as
it is in its files."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import surefoot
from project import Project, assert_same, checkpoints, final_weights, losses
from surefoot.errors import ModelError, RecipeError
from surefoot.parallel.world import World
from surefoot.recipe.recipe import load
from surefoot.run.assembly import build
from surefoot.use import export
from surefoot.use.model_loading import ModelFolders, with_valid

needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
ROOT = Path(__file__).parents[2]
LORA = {"lora": {"rank": 4, "dropout": 0.1}}


def project(folder, bits, *, method=LORA, **model):
    optim = {"adamw": {"learning_rate": 0.003, "schedule": "constant"}}
    return Project(folder, model={"quantization_bit": bits, **model}, method=method, optim=optim)


@pytest.mark.gpu
@needs_bitsandbytes
@pytest.mark.parametrize("bits", [4, 8])
def test_it_learns_goes_on_to_the_bit_and_merges_into_the_whole_base(bits, tmp_path):
    whole = project(tmp_path / "whole", bits)
    built = build(load(whole.recipe))
    kinds = {type(module).__name__ for module in built.policy.module.modules()}
    assert kinds & {"Linear4bit", "Linear8bitLt"}
    surefoot.train(whole.recipe)
    seen = list(losses(whole.run).values())
    assert seen[-1] < seen[0] - 0.1

    cut = project(tmp_path / "cut", bits)
    surefoot.train(cut.recipe, **{"train.max_steps": 6})
    surefoot.train(cut.recipe)
    assert_same(final_weights(cut.run), final_weights(whole.run))

    newest = checkpoints(whole.run)[-1]
    base = AutoModelForCausalLM.from_pretrained(whole.folder / "model")
    expected = PeftModel.from_pretrained(base, str(newest)).merge_and_unload().state_dict()
    out = export(newest, tmp_path / "merged")
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    merged = AutoModelForCausalLM.from_pretrained(out).state_dict()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name])


def test_whoever_opens_it_says_that_only_training_has_quantized_its_base(tmp_path, caplog):
    recipe = load(project(tmp_path, 4).recipe)
    folders = ModelFolders(tmp_path / "model", tmp_path / "run", tmp_path / "run", recipe)
    caplog.set_level("INFO")
    for _ in range(2):  # an export, and its verification
        assert with_valid(lambda _: folders, lambda parts: parts) == folders
    (line,) = caplog.messages
    assert "its base is used as it is stored, which gives other losses than training" in line
    assert "only training quantizes it (model.quantization_bit: 4)" in line


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_without_bitsandbytes_the_error_says_what_to_install(tmp_path):
    said = r"quantization_bit: 4 needs bitsandbytes.*pip install -e '.\[qlora\]'"
    with pytest.raises(ModelError, match=said):
        surefoot.train(project(tmp_path, 4).recipe)


@pytest.mark.parametrize("method", ["full", {"freeze": {"num_layers": 1}}])
def test_weights_of_4_bits_cannot_learn(method, tmp_path):
    made = project(tmp_path, 4, method=method)
    with pytest.raises(RecipeError, match=r"model.quantization_bit.*use method: lora"):
        load(made.recipe)


def test_settings_of_4_bits_are_refused_where_there_are_none(tmp_path):
    made = project(tmp_path, 8, quantization_type="fp4")
    with pytest.raises(RecipeError, match=r"model.quantization_type.*quantization_bit is 4"):
        load(made.recipe)


def test_several_processes_are_refused(tmp_path):
    made = project(tmp_path, 4)
    with pytest.raises(RecipeError, match="can be opened on one rank only, not on 2"):
        build(load(made.recipe), world=World(0, 2))
