"""A run keeps the identity of the models that its checkpoints do not contain."""

import json
import os
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

import surefoot
from project import Project, checkpoints, losses, model_folder, put_back
from surefoot.errors import ModelError
from surefoot.model import base_identity
from surefoot.model.base_identity import BaseModel, identify
from surefoot.model.section import ModelSection
from surefoot.plugins.cloud.hubs import HuggingFaceHub
from surefoot.use import open_model

SHORT = {"max_steps": 2}


def change_one_value(folder):
    """A copy of the weights with one value changed, of the same length, at the same time."""
    path = folder / "model.safetensors"
    before, tensors = path.stat(), load_file(path)
    next(iter(tensors.values())).view(-1)[7] += 1e-3
    save_file(tensors, path, {"format": "pt"})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def resume(project, **changes):
    return surefoot.train(project.recipe, **{"train.max_steps": 3, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    made = Project(tmp_path_factory.mktemp("lora"), method="lora", train=SHORT)
    surefoot.train(made.recipe)
    return made


@pytest.fixture
def lora(finished, tmp_path):
    with put_back(finished, tmp_path / "before") as made:
        yield made


def test_an_adapter_does_not_resume_on_a_base_that_has_changed_and_the_named_cure_works(lora):
    change_one_value(lora.folder / "model")
    said = r"has changed since checkpoint-2 .*model\.safetensors"
    with pytest.raises(ModelError, match=said) as refusal:
        resume(lora)
    key, _, value = str(refusal.value).rpartition("(")[2].removesuffix(")").partition("=")
    assert resume(lora, **{key: value, "train.output_dir": str(lora.folder / "new")})


def test_an_adapter_is_not_opened_on_a_base_that_has_changed_unless_it_is_named(lora):
    change_one_value(lora.folder / "model")
    with pytest.raises(ModelError, match=r"has changed since the adapter was trained"):
        open_model(lora.run)
    assert open_model(lora.run, base=lora.folder / "model").tokenizer


def test_a_new_run_that_starts_from_an_adapter_of_another_base_says_so(lora, caplog):
    change_one_value(lora.folder / "model")
    start = {"model.adapter": str(lora.run / "checkpoint-2")}
    resume(lora, **start, **{"train.output_dir": str(lora.folder / "new")})
    assert "was trained on other files of its base" in caplog.text


def test_a_base_that_only_moved_or_was_written_anew_is_the_same(lora):
    config = lora.folder / "model" / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "transformers_version": "9.9"}))
    weights = lora.folder / "model" / "model.safetensors"
    shutil.copy(weights, weights.with_name("copy"))
    weights.with_name("copy").rename(weights)
    assert resume(lora).global_step == 3


def test_a_changed_configuration_is_noticed_whatever_the_method(tmp_path):
    made = Project(tmp_path, method="full", train=SHORT)
    surefoot.train(made.recipe)
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config["rms_norm_eps"] = 0.1
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"has changed since checkpoint-2 .*config\.json"):
        resume(made)


@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=pytest.mark.proof)])
def test_a_reference_that_has_changed_is_noticed(method, tmp_path):
    """Its log-probabilities lie in the cache, under the times of its files."""
    model_folder(tmp_path / "reference")
    stage = {"dpo": {"reference": str(tmp_path / "reference")}}
    made = Project(tmp_path, method=method, stage=stage, train=SHORT, data={"datasets": ["pairs"]})
    surefoot.train(made.recipe)
    change_one_value(tmp_path / "reference")
    with pytest.raises(ModelError, match=r"the reference: .* has changed"):
        resume(made)


@pytest.mark.proof
def test_the_start_of_a_full_run_counts_if_it_is_the_reference(tmp_path):
    made = Project(tmp_path, method="full", stage="dpo", train=SHORT, data={"datasets": ["pairs"]})
    surefoot.train(made.recipe)
    change_one_value(tmp_path / "model")
    with pytest.raises(ModelError, match=r"model\.path: .* has changed"):
        resume(made)


def test_a_checkpoint_without_a_record_resumes(lora):
    newest = checkpoints(lora.run)[-1]
    record = json.loads((newest / base_identity.NAME).read_text())
    assert record["policy"]["files"].keys() == {"config.json", "model.safetensors"}
    assert base_identity.read(lora.folder / "model") == {}  # as of an older version


def test_an_untouched_file_is_not_read_again_and_a_young_one_is(tmp_path, monkeypatch):
    folder = model_folder(tmp_path / "model")
    base = {"policy": BaseModel(ModelSection(path=str(folder)), folder)}
    young = identify(base, {})
    monkeypatch.setattr(base_identity, "_SETTLED", 0.0)
    time.sleep(0.05)
    settled = identify(base, young)
    assert settled["policy"].files["config.json"].hash == young["policy"].files["config.json"].hash
    monkeypatch.setattr(base_identity, "_hash", lambda path: "read")
    assert identify(base, settled) == settled
    assert identify(base, young)["policy"].files["config.json"].hash == "read"


def test_only_the_files_that_are_loaded_count(tmp_path):
    folder = model_folder(tmp_path / "model")
    save_file({"x": torch.zeros(3)}, folder / "consolidated.safetensors")
    base = BaseModel(ModelSection(path=str(folder)), folder)
    assert base.paths().keys() == {"config.json", "model.safetensors"}


COMMITS = ["a" * 40, "b" * 40]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one model, whose main branch is pushed by ``push``."""
    downloads = tmp_path / "hub" / "snapshots"
    asked = []

    def snapshot(_hub, _kind, name, *, revision=None, **_patterns):
        asked.append(revision)
        return downloads / (revision or (downloads.parent / "main").read_text())

    monkeypatch.setattr(HuggingFaceHub, "snapshot", snapshot)

    def push(commit):
        model_folder(downloads / commit, initializer_range=0.02 if commit[0] == "a" else 0.05)
        (downloads.parent / "main").write_text(commit)

    push(COMMITS[0])
    return push, asked


def test_a_run_stays_at_the_commit_with_which_it_began(hub, tmp_path):
    push, asked = hub
    runs = [
        Project(tmp_path / name, method="lora", train=SHORT, model={"path": "some/model"})
        for name in "ab"
    ]
    for made in runs:
        surefoot.train(made.recipe)
    resume(runs[0])
    push(COMMITS[1])
    asked.clear()
    resume(runs[1])
    assert asked[-1] == COMMITS[0]  # before, config.json is read for data.cutoff_len
    assert losses(runs[1].run) == losses(runs[0].run)
    config = json.loads((checkpoints(runs[1].run)[-1] / "adapter_config.json").read_text())
    assert config["revision"] == COMMITS[0]
