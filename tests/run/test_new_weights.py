"""Models with new weights: those of transformers under a seed, the same for every way to train."""

import json
import logging
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import surefoot
from folders import save_data, save_recipe
from project import surefoot as command_line
from surefoot.errors import ModelError, RecipeError
from surefoot.model.section import ModelSection
from surefoot.recipe.recipe import load
from surefoot.training import TrainerCallback
from surefoot.use import open_model

ROWS = [{"instruction": f"{a}+{b}?", "output": f"{a + b}"} for a in range(4) for b in range(6)]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A recipe whose model is a configuration and a tokenizer."""
    folder = tmp_path_factory.mktemp("new")
    path = save_recipe(folder, data={"val_size": 0}, train={"eval_steps": None, "max_steps": 4})
    save_data(folder / "data", rows=ROWS)
    model = Path(load(path).model.path)
    bare = folder / "configuration"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors*"))
    text = path.read_text()
    assert str(model) in text or model.name in text
    return path, bare


def new(bare, output, **more):
    return {
        "model.path": str(bare),
        "model.new_weights": True,
        "method": "full",
        "train.output_dir": str(output),
        **more,
    }


def reference(bare, seed):
    """What transformers alone makes of it."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(bare), dtype=torch.float32)


def made_in(output):
    (folder,) = Path(output).glob("new-weights-*")
    return folder


def assert_same(model, other):
    values = other.state_dict()
    assert model.state_dict().keys() == values.keys()
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())


class Kill(TrainerCallback):
    """Ends a run after a step, as a signal would."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control):
        if state.global_step == self.step:
            signal.raise_signal(signal.SIGTERM)


def test_new_weights_are_those_of_transformers_under_the_seed_of_the_recipe(project, tmp_path):
    path, bare = project
    surefoot.train(path, **new(bare, tmp_path / "run", **{"train.seed": 5, "train.max_steps": 1}))
    folder = made_in(tmp_path / "run")
    assert_same(AutoModelForCausalLM.from_pretrained(folder), reference(bare, 5))
    record = json.loads((folder / "new_weights.json").read_text())
    assert (record["configuration"], record["seed"]) == (str(bare), 5)
    checkpoint = tmp_path / "run/checkpoint-1"
    assert json.loads((checkpoint / "new_weights.json").read_text()) == record
    assert load(checkpoint / "recipe.yaml").model.path == str(folder)


def test_a_run_from_new_weights_is_the_run_from_a_model_with_them(project, tmp_path):
    path, bare = project
    model = tmp_path / "model"
    reference(bare, 42).save_pretrained(model)
    AutoTokenizer.from_pretrained(bare).save_pretrained(model)
    usual = surefoot.train(
        path, **new(model, tmp_path / "usual", **{"model.new_weights": False, "train.seed": 42})
    )
    config_file = bare / "config.json"
    found = surefoot.train(path, **new(config_file, tmp_path / "run", **{"train.seed": 42}))
    assert_same(found.model, usual.model)
    config = AutoConfig.from_pretrained(bare)
    given = surefoot.train(
        path,
        **{"method": "full", "train.output_dir": str(tmp_path / "given"), "train.seed": 42},
        model=config,
        tokenizer=AutoTokenizer.from_pretrained(bare),
    )
    assert_same(given.model, usual.model)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_from_new_weights_resumes_bitwise(project, tmp_path, method):
    path, bare = project
    usual = surefoot.train(path, **new(bare, tmp_path / "usual", method=method))
    settings = new(bare, tmp_path / "run", method=method)
    assert surefoot.train(path, **settings, callbacks=[Kill(2)]).global_step == 2
    if method == "lora":  # the base is made again, to the bit
        shutil.rmtree(made_in(tmp_path / "run"))
    found = surefoot.train(path, **settings)
    assert found.global_step == usual.global_step == 4
    assert_same(found.model, usual.model)
    assert_same(open_model(tmp_path / "run").network.module, usual.model)


def test_two_ranks_and_the_commands_start_from_the_same_new_weights(project, tmp_path):
    path, bare = project
    settings = [f"{name}={value}" for name, value in new(bare, tmp_path / "run").items()]
    settings = [setting.replace("True", "true") for setting in settings]
    for command in (["plan"], ["bench", "--steps", "1"]):
        code, _, err = command_line(*command, path, *settings)
        assert (code, (tmp_path / "run").exists()) == (0, False), err
    code, _, err = command_line("eval", path, "--model", "base", *settings)
    assert code == 2
    assert "model.new_weights: " in err
    assert "has no weights before `surefoot train` makes them" in err
    two = "parallel.num_processes=2"
    code, _, err = command_line("train", path, *settings, two, "parallel.tp=2")
    assert code == 0, err
    assert err.count("new weights: ") == 1
    assert_same(
        AutoModelForCausalLM.from_pretrained(made_in(tmp_path / "run")), reference(bare, 42)
    )


def test_a_run_in_a_store_makes_the_same_new_weights_on_another_machine(project, tmp_path):
    path, bare = project
    constant = {"optim.adamw.schedule": "constant"}
    usual = surefoot.train(path, **new(bare, tmp_path / "usual"), **constant)
    for machine, steps in (("one", 2), ("other", 4)):
        settings = new(bare, f"file://{tmp_path}/away", **{"train.max_steps": steps})
        cache = {"train.cache_dir": str(tmp_path / machine)}
        found = surefoot.train(path, **settings, **cache, **constant)
    assert found.global_step == usual.global_step == 4
    assert_same(found.model, usual.model)


def test_weights_of_the_configuration_are_not_used_and_that_is_said(project, tmp_path, caplog):
    path, _ = project
    caplog.set_level(logging.INFO)
    model = Path(load(path).model.path)
    surefoot.train(path, **new(model, tmp_path / "run", **{"train.max_steps": 1}))
    assert f"model.new_weights: the weights in {model} are not used" in caplog.messages
    values = load_file(made_in(tmp_path / "run") / "model.safetensors")
    stored = load_file(model / "model.safetensors")
    assert not all(torch.equal(values[name], stored[name]) for name in values)


def test_what_new_weights_need_is_said_with_the_cure(project, tmp_path):
    path, bare = project
    settings = new(bare, tmp_path / "run")
    with pytest.raises(ModelError, match=r"weights are missing\. .* model\.new_weights: true"):
        surefoot.train(path, **{**settings, "model.new_weights": False})
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(bare / "config.json", alone)
    with pytest.raises(ModelError, match=r"no tokenizer in .*alone; copy one"):
        surefoot.train(path, **{**settings, "model.path": str(alone)})
    other = tmp_path / "small.json"
    shutil.copy(bare / "config.json", other)
    with pytest.raises(ModelError, match=r"small\.json is a file; expected the folder .* itself"):
        surefoot.train(path, **{**settings, "model.path": str(other)})
    with pytest.raises(RecipeError, match="checkpoints of an adapter do not contain its base"):
        surefoot.train(
            path, **{**settings, "train.output_dir": "s3://bucket/run", "method": "lora"}
        )
    with pytest.raises(ValueError, match="new_weights and an adapter do not go together"):
        ModelSection(path="x", new_weights=True, adapter=Path("y"))
    assert not list(tmp_path.glob("run/new-weights-*"))
    with pytest.raises(ModelError, match=r"an object without a folder has no tokenizer"):
        surefoot.train(
            path,
            **{"train.output_dir": str(tmp_path / "run")},
            model=AutoConfig.for_model("llama"),
        )
    with pytest.raises(ModelError, match=r"Linear cannot be trained: expected a model or a conf"):
        surefoot.train(
            path, **{"train.output_dir": str(tmp_path / "run")}, model=torch.nn.Linear(2, 2)
        )
