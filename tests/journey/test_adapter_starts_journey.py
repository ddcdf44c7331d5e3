"""A run that starts from the weights, through the command: resumed, continued, merged."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import surefoot
from project import Project, assert_same, checkpoints, final_weights, losses
from surefoot.errors import CheckpointError
from surefoot.model import base_identity
from surefoot.plugins.trainers.to_trainer import save_trainer_checkpoint
from surefoot.recipe.recipe import load
from surefoot.use import export
from surefoot.use.model_loading import open_model

IDS = torch.arange(3, 23)[None]
PISSA = {
    "method": {"lora": {"rank": 3, "init": "pissa"}},
    "optim": {"adamw": {"learning_rate": 0.003, "schedule": "constant"}},
}


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    made = Project(tmp_path_factory.mktemp("starts"), **PISSA)
    surefoot.train(made.recipe)
    return made


def test_a_run_resumes_to_the_same_bits(whole, tmp_path):
    cut = Project(tmp_path / "cut", **PISSA)
    surefoot.train(cut.recipe, **{"train.max_steps": 6})
    surefoot.train(cut.recipe)
    assert losses(cut.run) == losses(whole.run)
    assert_same(final_weights(cut.run), final_weights(whole.run))


def test_its_checkpoint_is_an_adapter_for_every_command(whole, tmp_path):
    newest, base = checkpoints(whole.run)[-1], whole.folder / "model"
    plain = AutoModelForCausalLM.from_pretrained(base)
    expected = logits(PeftModel.from_pretrained(plain, newest))
    opened = open_model(whole.run)
    torch.testing.assert_close(logits(opened.network.module), expected, atol=1e-5, rtol=1e-5)
    merged = AutoModelForCausalLM.from_pretrained(export(newest, tmp_path / "merged"))
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=1e-5)
    recipe = load(whole.recipe)
    with pytest.raises(CheckpointError, match=r"frozen adapters of its run.*--to peft"):
        save_trainer_checkpoint(newest, tmp_path / "trainer", run=recipe, base=base)

    below = {"path": str(base), "frozen_adapters": [str(newest)]}
    above = Project(tmp_path / "above", method={"lora": {"rank": 2}}, model=below)
    surefoot.train(above.recipe, **{"train.max_steps": 2})
    assert losses(above.run)[1] < losses(whole.run)[1]
    own = open_model(above.run)
    last = checkpoints(above.run)[-1]
    plain = AutoModelForCausalLM.from_pretrained(base)
    expected = logits(PeftModel.from_pretrained(plain, last))
    torch.testing.assert_close(logits(own.network.module), expected, atol=1e-5, rtol=1e-5)

    recorded = base_identity.read(last)["policy"].files
    assert "adapter/frozen_0/manifest.json" in recorded, "so that another one is refused"
