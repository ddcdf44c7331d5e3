"""Weights of MindSpore Transformers are trained and asked like any other model."""

import json

import pytest
import torch

from folders import save_data, save_model, save_recipe
from surefoot.checkpoint.contents import open_contents
from surefoot.checkpoint.mindspore.parallel import ParallelConfig
from surefoot.checkpoint.mindspore.rewrite import Wanted
from surefoot.checkpoint.source import Stored, read_whole
from surefoot.inference.mindspore import write_mindspore
from surefoot.inference.opened import open_model
from surefoot.model.section import ModelSection
from surefoot.recipe.recipe import load
from surefoot.run import build, run
from surefoot.startup import begin

FORMS = {
    "full": Wanted(names="legacy-fused"),
    "distributed": Wanted("distributed", ParallelConfig(2, 2, 3), names="legacy-fused"),
    "iteration": Wanted("distributed", ParallelConfig(1, 4), is_iteration=True),
}

SAVES = {"save_steps": 2, "async_save": False}


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
def test_a_process_reads_just_its_part_of_mindspores_weights(model, tmp_path, form):
    write_mindspore(model, tmp_path / "theirs", FORMS[form])
    section = ModelSection(path=str(tmp_path / "theirs"))
    assert begin(tmp_path / "theirs", section, dtype="auto") is not None


@pytest.mark.parametrize("form", FORMS)
def test_training_from_mindspores_weights_is_training_from_the_model(model, tmp_path, form):
    write_mindspore(model, tmp_path / "theirs", FORMS[form])
    losses = []
    for name in ("model", "theirs"):
        path = save_recipe(
            tmp_path,
            model={"path": str(tmp_path / name)},
            train={"max_steps": 2, "eval_steps": None, "output_dir": str(tmp_path / f"run-{name}")},
            checkpoint=SAVES,
        )
        build(load(path)).fit()
        rows = (tmp_path / f"run-{name}" / "metrics.jsonl").read_text().splitlines()
        losses.append([row["loss"] for row in map(json.loads, rows) if "loss" in row])
    assert losses[0]
    assert losses[0] == losses[1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of four steps, and what it saved after two in each of MindSpore's forms."""
    folder = tmp_path_factory.mktemp("trained")
    save_data(folder / "data")
    save_model(folder / "model", "qwen2", num_attention_heads=4, num_key_value_heads=4)
    run(load(save_recipe(folder, train={"eval_steps": None}, checkpoint=SAVES)))
    for form, wanted in FORMS.items():
        write_mindspore(folder / "run" / "checkpoint-2", folder / form, wanted)
    return folder


def assert_goes_on(trained, recipe):
    """Its last checkpoint is that of the run that never stopped: weights, moments, state."""
    state = run(recipe).state
    assert state.global_step == 4
    found, expected = (
        Stored(open_contents(folder / "checkpoint-4", ("model", "optimizer")))
        for folder in (recipe.train.folder, trained / "run")
    )
    assert found.shapes() == expected.shapes()
    odd = [
        name
        for name in expected.shapes()
        if not torch.equal(read_whole(found, name), read_whole(expected, name))
    ]
    assert odd == []


@pytest.mark.parametrize("form", FORMS)
def test_a_run_that_goes_on_from_mindspores_state_is_the_one_that_never_stopped(
    trained, tmp_path, form
):
    path = save_recipe(
        trained,
        train={"eval_steps": None, "output_dir": str(tmp_path / "run")},
        checkpoint={**SAVES, "resume": str(trained / form)},
    )
    assert_goes_on(trained, load(path))
