"""Weights of MindSpore Transformers are trained and asked like any other model."""

import json

import pytest
import torch

from folders import save_data, save_model, save_recipe
from surefoot.checkpoint.mindspore.parallel import ParallelConfig
from surefoot.checkpoint.mindspore.rewrite import Wanted
from surefoot.inference.mindspore import write_mindspore
from surefoot.inference.opened import open_model
from surefoot.recipe.recipe import load
from surefoot.run import build

FORMS = {
    "full": Wanted(names="legacy-fused"),
    "distributed": Wanted("distributed", ParallelConfig(2, 2, 3), names="legacy-fused"),
    "iteration": Wanted("distributed", ParallelConfig(1, 4), is_iteration=True),
}


@pytest.fixture
def model(tmp_path):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3}
    save_data(tmp_path / "data")
    return save_model(tmp_path / "model", "qwen2", **sizes)


@pytest.mark.parametrize("form", FORMS)
def test_a_model_of_mindspores_answers_as_the_one_it_came_from(model, tmp_path, form):
    write_mindspore(model, tmp_path / "theirs", FORMS[form])
    found, expected = open_model(tmp_path / "theirs"), open_model(model)
    ids = torch.tensor([expected.continuation("1 + 1 =")])
    with torch.no_grad():
        logits = [opened.model(ids).logits for opened in (found, expected)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("form", FORMS)
def test_training_from_mindspores_weights_is_training_from_the_model(model, tmp_path, form):
    write_mindspore(model, tmp_path / "theirs", FORMS[form])
    losses = []
    for name in ("model", "theirs"):
        path = save_recipe(
            tmp_path,
            model={"path": str(tmp_path / name)},
            train={"max_steps": 2, "eval_steps": None, "output_dir": str(tmp_path / f"run-{name}")},
        )
        build(load(path)).fit()
        rows = (tmp_path / f"run-{name}" / "metrics.jsonl").read_text().splitlines()
        losses.append([row["loss"] for row in map(json.loads, rows) if "loss" in row])
    assert losses[0]
    assert losses[0] == losses[1]
