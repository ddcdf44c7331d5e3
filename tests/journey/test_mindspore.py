"""Weights of MindSpore Transformers are trained and asked like any other model."""

import json
import math

import pytest
import torch
from safetensors import safe_open

from each import some
from folders import save_data, save_model, save_recipe
from surefoot.checkpoint.layouts.detection import open_contents
from surefoot.checkpoint.sources import FolderSource, read_whole
from surefoot.model.section import ModelSection
from surefoot.network.shard_loading import init_on_meta
from surefoot.plugins.mindspore.recipe import convert as convert_recipe
from surefoot.plugins.mindspore.target import MindSporeFolder
from surefoot.plugins.mindspore.tensor_layout import ParallelConfig
from surefoot.recipe.recipe import load, read
from surefoot.recipe.yaml import parse
from surefoot.run.training_run import build, run
from surefoot.use.exporting.conversion import convert
from surefoot.use.model_loading import open_model

FORMS = {
    "full": MindSporeFolder(names="legacy-fused"),
    "distributed": MindSporeFolder(
        layout="distributed", parallel_config=ParallelConfig(2, 2, 3), names="legacy-fused"
    ),
    "iteration": MindSporeFolder(
        layout="distributed", parallel_config=ParallelConfig(1, 4), iteration=True
    ),
}

SAVES = {"save_steps": 2, "async_save": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3}
    save_data(folder / "data")
    return save_model(folder / "model", "qwen2", **sizes)


@pytest.mark.parametrize("form", some(FORMS, ["distributed"]))
def test_a_model_of_mindspores_answers_as_the_one_it_came_from(model, tmp_path, form):
    convert(model, tmp_path / "theirs", FORMS[form])
    found, expected = open_model(tmp_path / "theirs"), open_model(model)
    ids = torch.tensor([expected.continuation("1 + 1 =")])
    with torch.no_grad():
        logits = [opened.model(ids).logits for opened in (found, expected)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("form", some(FORMS, ["distributed"]))
def test_a_process_reads_just_its_part_of_mindspores_weights(model, tmp_path, form):
    convert(model, tmp_path / "theirs", FORMS[form])
    section = ModelSection(path=str(tmp_path / "theirs"))
    assert init_on_meta(tmp_path / "theirs", section, dtype="auto") is not None


def losses(folder, model, run_folder):
    """Of a training that begins with ``model``."""
    train = {"max_steps": 2, "eval_steps": None, "log_steps": 1, "output_dir": str(run_folder)}
    path = save_recipe(folder, model={"path": str(model)}, train=train, checkpoint=SAVES)
    build(load(path)).fit()
    rows = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, rows) if "loss" in row]


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory):
    return losses(model.parent, model, tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("form", some(FORMS, ["distributed"]))
def test_training_from_mindspores_weights_is_training_from_the_model(
    model, expected, tmp_path, form
):
    convert(model, tmp_path / "theirs", FORMS[form])
    assert len(expected) == 2
    assert losses(model.parent, tmp_path / "theirs", tmp_path / "run") == expected


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of four steps, and what it saved after two in each of MindSpore's forms."""
    folder = tmp_path_factory.mktemp("trained")
    save_data(folder / "data")
    save_model(folder / "model", "qwen2", num_attention_heads=4, num_key_value_heads=4)
    run(load(save_recipe(folder, train={"eval_steps": None}, checkpoint=SAVES)))
    for form, wanted in FORMS.items():
        convert(folder / "run" / "checkpoint-2", folder / form, wanted)
    return folder


def assert_goes_on(trained, recipe):
    """Its last checkpoint is that of the run that never stopped: weights, moments, state."""
    state = run(recipe).state
    assert state.global_step == 4
    found, expected = (
        FolderSource(open_contents(folder / "checkpoint-4", ("model", "optimizer")))
        for folder in (recipe.train.folder, trained / "run")
    )
    assert found.shapes() == expected.shapes()
    odd = [
        name
        for name in expected.shapes()
        if not torch.equal(read_whole(found, name), read_whole(expected, name))
    ]
    assert odd == []


GO_ON = """\
run_mode: finetune
output_dir: {run}
load_checkpoint: {folder}
pretrained_model_dir: {model}
load_ckpt_format: safetensors
auto_trans_ckpt: True
resume_training: True
callbacks:
  - type: CheckpointMonitor
    checkpoint_format: safetensors
    save_checkpoint_steps: 2
    async_save: False
"""


def from_yaml(trained, text):
    """Their file as a recipe of the project in ``trained``."""
    settings = convert_recipe(parse(text, "theirs.yaml")).settings
    content = parse(save_recipe(trained, train={"eval_steps": None}).read_text(), "ours").data
    return read(content, settings)


@pytest.mark.parametrize("form", some(FORMS, ["distributed"]))
def test_a_run_that_goes_on_from_mindspores_state_is_the_one_that_never_stopped(
    trained, tmp_path, form
):
    places = {"run": tmp_path / "run", "folder": trained / form, "model": trained / "model"}
    assert_goes_on(trained, from_yaml(trained, GO_ON.format(**places)))


PRETRAIN = """\
run_mode: train
output_dir: {run}
pretrained_model_dir: {model}
callbacks:
  - type: CheckpointMonitor
    checkpoint_format: safetensors
    integrated_save: False
    remove_redundancy: True
    async_save: False
"""


def test_a_pretraining_saves_each_slice_once(trained, tmp_path):
    run(from_yaml(trained, PRETRAIN.format(run=tmp_path / "run", model=trained / "model")))
    checkpoint, theirs = tmp_path / "run" / "checkpoint-4", tmp_path / "theirs"
    assert (checkpoint / "rank_00000" / "optimizer.safetensors").exists()
    wanted = MindSporeFolder(
        layout="distributed", parallel_config=ParallelConfig(2, 2), remove_redundancy=True
    )
    convert(checkpoint, theirs, wanted)
    files = sorted((theirs / "checkpoint").rglob("*.safetensors"))
    whole = FolderSource(open_contents(checkpoint, ("model", "optimizer")))
    moments = [s for n, s in whole.shapes().items() if not n.endswith(".step")]
    stored = sum(sum(math.prod(s) for s in sizes(file).values() if s) for file in files)
    assert len(files) == 4
    assert stored - 4 == sum(map(math.prod, moments))  # global_step has a dimension
    assert all(len(sizes(file)) > 4 for file in files)


def sizes(file):
    with safe_open(file, "pt") as opened:
        return {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
