"""Between every two kinds of folders: what has a meaning is converted, the rest is refused by
name."""

import pytest
import torch

from cli.ckpt.runner import run as ckpt
from damage import flip
from folders import save_adapter, save_model, save_recipe
from surefoot.checkpoint.layouts.opening import open_named
from surefoot.checkpoint.sources import read_whole
from surefoot.errors import CheckpointError
from surefoot.recipe.recipe import load
from surefoot.run.training_run import build
from surefoot.storage import files

CUT = ("--layout", "distributed")
TARGETS = {
    "huggingface": ("--to", "huggingface"),
    "peft": ("--to", "peft"),
    "surefoot": ("--to", "surefoot", "--layout", "full"),
    "surefoot ranks": ("--to", "surefoot", *CUT, "--mesh", "dp_shard=2"),
    "mindspore": ("--to", "mindspore"),
    "mindspore ranks": ("--to", "mindspore", *CUT, "--parallel-config", "model_parallel=2"),
}
WRITERS = {
    **TARGETS,
    "dcp": ("--to", "dcp"),
    "float16": ("--to", "huggingface", "--dtype", "float16"),
}
MODELS = ("huggingface", "surefoot", "surefoot ranks", "mindspore", "mindspore ranks")
ADAPTERS = ("peft", "surefoot adapter", "surefoot adapter ranks")


def converted(source, target, kind):
    done = ckpt("convert", source, target, *TARGETS[kind])
    assert done.exit_code == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder of every kind, of one model and of one adapter of it."""
    folder = tmp_path_factory.mktemp("sources")
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1}
    found = {"huggingface": save_model(folder / "model", "qwen2", **sizes)}
    found["peft"] = save_adapter(found["huggingface"], folder / "adapter")
    for kind in MODELS[1:]:
        found[kind] = converted(found["huggingface"], folder / kind, kind)
    for kind in ("surefoot", "surefoot ranks"):
        name = kind.replace("surefoot", "surefoot adapter")
        found[name] = converted(found["peft"], folder / name, kind)
    found["merged"] = converted(found["peft"], folder / "merged", "huggingface")
    return found


def tensors(folder):
    source = open_named(folder)
    return {name: read_whole(source, name) for name in source.shapes()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", MODELS)
def test_a_model_becomes_every_kind_of_model(sources, tmp_path, source, target):
    if target == "peft":
        done = ckpt("convert", sources[source], tmp_path / "out", *TARGETS[target])
        assert done.exit_code == 2
        assert "it contains no adapter; use --to huggingface for a model" in done.stderr
        assert not (tmp_path / "out").exists()
        return
    found = converted(sources[source], tmp_path / "out", target)
    assert_equal(tensors(found), tensors(sources["huggingface"]))
    has_config = "checkpoint" not in [path.name for path in found.iterdir()]
    assert (found / "config.json").exists() or not has_config


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", ADAPTERS)
def test_an_adapter_stays_one_or_is_merged(sources, tmp_path, source, target):
    found = converted(sources[source], tmp_path / "out", target)
    is_adapter = target in ("peft", "surefoot", "surefoot ranks")
    assert_equal(tensors(found), tensors(sources["peft" if is_adapter else "merged"]))


@pytest.mark.parametrize("command", ["show", "ls", "verify"])
@pytest.mark.parametrize("kind", ["surefoot", "surefoot ranks", "surefoot adapter"])
def test_every_command_takes_a_checkpoint_of_weights_alone(sources, kind, command):
    done = ckpt(command, sources[kind])
    assert done.exit_code == 0, done.stderr


def test_going_on_from_weights_alone_is_refused_and_starting_from_them_is_not(sources, tmp_path):
    folder = sources["surefoot ranks"]
    path = save_recipe(tmp_path, model={"path": str(folder)}, checkpoint={"resume": str(folder)})
    with pytest.raises(CheckpointError, match=r"remove checkpoint.resume and set model.path="):
        build(load(path), resume=folder)
    made = build(load(path))
    assert_equal(made.policy.weights.state_dict(), tensors(sources["huggingface"]))


@pytest.mark.parametrize("target", WRITERS)
def test_what_a_disk_does_not_give_back_as_it_was_written_is_no_conversion(
    sources, tmp_path, target, monkeypatch
):
    sync = files.File.sync

    def damaging(self):
        sync(self)
        if ".safetensors" in self.path.name:
            flip(self.path, -1)

    monkeypatch.setattr(files.File, "sync", damaging)
    source = sources["peft" if target == "peft" else "huggingface"]
    done = ckpt("convert", source, tmp_path / "out", *WRITERS[target])
    assert done.exit_code == 2
    assert "is deleted, check the disk and try again" in done.stderr
    assert not (tmp_path / "out").exists()
    done = ckpt("convert", source, tmp_path / "out", *WRITERS[target], "--no-verify")
    assert done.exit_code == 0
