"""What a save leaves on the disk: files that other tools open as they lie, or nothing at all."""

import json
import os
import stat
import sys
from importlib.metadata import version

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tiny
from surefoot.checkpoint.saving.preparation import save
from surefoot.checkpoint.verification import verify
from surefoot.errors import CheckpointError

from ..sample import Holder, same_bits, sample_states, tree_bytes


def llama():
    return tiny.model(num_hidden_layers=2)


def test_the_files_are_those_of_the_specification(tmp_path):
    folder = save(
        tmp_path / "run",
        7,
        sample_states(),
        companions={"config.json": b"{}", "sub/x.jinja": b"y"},
    )
    assert folder == tmp_path / "run" / "checkpoint-7"
    assert sorted(tree_bytes(folder)) == [
        "config.json", "manifest.json", "model.safetensors", "optimizer.safetensors", "state.json",
        "state.safetensors", "sub/x.jinja",
    ]  # fmt: skip
    assert [p.name for p in folder.parent.iterdir()] == ["checkpoint-7"]


def test_the_keys_are_those_of_the_specification(tmp_path):
    states = sample_states()
    folder = save(tmp_path, 7, states)
    model = load_file(folder / "model.safetensors")
    assert model.keys() == states["model"].state.keys()
    assert all(same_bits(model[n], t) for n, t in states["model"].state.items())
    assert "model.norm.weight.exp_avg" in load_file(folder / "optimizer.safetensors")
    assert list(load_file(folder / "state.safetensors")) == ["random.torch"]
    state = json.loads((folder / "state.json").read_text())
    assert state["loader"] == {"epoch": 1, "index": 12345, "seed": {"$int": hex(2**63)}}
    assert state["optimizer"]["groups"] == [{"lr": 1e-4, "betas": {"$tuple": [0.9, 0.999]}}]


def test_the_manifest_says_what_is_there(tmp_path):
    folder = save(
        tmp_path,
        7,
        sample_states(),
        parent="checkpoint-3",
        companions={"config.json": b"{}"},
    )
    manifest = json.loads((folder / "manifest.json").read_text())
    sizes = {p.name: p.stat().st_size for p in folder.iterdir() if p.name != "manifest.json"}
    assert manifest["files"] == sizes
    assert manifest["hashes"].keys() == sizes.keys()
    assert (manifest["step"], manifest["kind"], manifest["layout"], manifest["parent"]) == (
        7,
        "full",
        "full",
        "checkpoint-3",
    )
    assert (manifest["world_size"], manifest["format"], manifest["version"]) == (
        1,
        "surefoot-checkpoint",
        "1.0",
    )
    assert manifest["created"].endswith("Z")
    assert manifest["versions"]["torch"] == version("torch")
    piece = next(p for p in manifest["pieces"] if p["tensor"] == "model/model.norm.weight")
    assert piece["key"] == "model.norm.weight"
    assert piece["box"] == [[0], [8]] and piece["shape"] == [8] and piece["dtype"] == "F32"


@pytest.mark.parametrize("limit", [5_000_000_000, 3000])
def test_a_full_checkpoint_opens_with_from_pretrained_as_it_lies(tmp_path, limit):
    model = llama()
    config = model.config.to_json_string().encode()
    states = {"model": Holder(dict(model.state_dict()))}
    folder = save(tmp_path, 1, states, companions={"config.json": config}, max_shard_size=limit)
    assert (folder / "model.safetensors.index.json").exists() == (limit == 3000)
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert all(same_bits(again.state_dict()[n], t) for n, t in model.state_dict().items())
    ids = torch.arange(8)[None]
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)


def test_an_adapter_checkpoint_opens_with_peft_as_it_lies(tmp_path):
    base = llama()
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    weights = get_peft_model_state_dict(model)
    settings = {**model.peft_config["default"].to_dict(), "inference_mode": True}
    config = json.dumps(settings, default=sorted).encode()
    # a limit far below the adapter's size: PEFT knows no shards
    folder = save(
        tmp_path,
        1,
        {"model": Holder(weights)},
        kind="adapter",
        companions={"adapter_config.json": config},
        max_shard_size=10,
    )
    assert (folder / "adapter_model.safetensors").exists()
    again = PeftModel.from_pretrained(llama(), folder)
    found = get_peft_model_state_dict(again)
    assert found.keys() == weights.keys()
    assert all(same_bits(found[n], t) for n, t in weights.items())


def test_shards_are_complete_and_the_optimizer_is_sharded_alike(tmp_path):
    folder = save(tmp_path, 1, sample_states(scale=4), max_shard_size=1500)
    assert verify(folder, full=True).ok
    for stem in ("model", "optimizer"):
        index = json.loads((folder / f"{stem}.safetensors.index.json").read_text())
        held = {name: p.name for p in folder.glob(f"{stem}-*.safetensors") for name in load_file(p)}
        assert index["weight_map"] == held
        assert index["metadata"]["total_size"] == sum(
            t.nbytes for p in folder.glob(f"{stem}-*.safetensors") for t in load_file(p).values()
        )
        count = len(list(folder.glob(f"{stem}-*.safetensors")))
        assert count > 1
        assert (folder / f"{stem}-00001-of-{count:05d}.safetensors").exists()


def test_files_are_readable_by_whom_the_umask_says(tmp_path):
    old = os.umask(0o022)
    try:
        folder = save(tmp_path, 1, sample_states(), companions={"config.json": b"{}"})
    finally:
        os.umask(old)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert {stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()} == {0o644}


def test_two_saves_of_the_same_states_hold_the_same_tensors(tmp_path):
    one = tree_bytes(save(tmp_path / "a", 1, sample_states()))
    two = tree_bytes(save(tmp_path / "b", 1, sample_states()))
    assert {n: d for n, d in one.items() if n != "manifest.json"} == {
        n: d for n, d in two.items() if n != "manifest.json"
    }


def test_saving_changes_no_state(tmp_path):
    states, fresh = sample_states(), sample_states()
    save(tmp_path, 1, states)
    assert all(same_bits(states["model"].state[n], t) for n, t in fresh["model"].state.items())


def test_a_checkpoint_is_never_overwritten(tmp_path):
    folder = save(tmp_path, 1, sample_states(0))
    before = tree_bytes(tmp_path)
    with pytest.raises(
        CheckpointError,
        match="checkpoint-1: it exists already, and a checkpoint is never overwritten",
    ):
        save(tmp_path, 1, sample_states(1))
    assert tree_bytes(tmp_path) == before
    assert verify(folder, full=True).ok


def test_nothing_of_a_state_that_cannot_be_stored_is_left(tmp_path):
    for states in (
        {"model": Holder({"w": torch.ones(2).to_sparse()})},
        {"model": Holder({"w": [1]})},
        {"trainer": Holder({"x": object()})},
        {"a b": Holder({})},
        {"$tensor": Holder({})},
    ):
        with pytest.raises(CheckpointError):
            save(tmp_path, 1, states)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "state.json",
        "model.safetensors",
        "x.safetensors",
        "../x",
        "/x",
        "",
        ".x",
        "a//b",
    ],
)
def test_a_companion_of_a_name_that_is_taken_or_leads_elsewhere_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="companion"):
        save(tmp_path, 1, sample_states(), companions={name: b""})
    assert list(tmp_path.iterdir()) == []


def test_an_index_of_shards_is_no_companion(tmp_path):
    with pytest.raises(CheckpointError, match="companion"):
        save(
            tmp_path,
            1,
            sample_states(),
            companions={"model.safetensors.index.json": b""},
            max_shard_size=300,
        )


def test_a_companion_must_be_small(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[save.__module__], "MAX_SMALL", 3)
    with pytest.raises(CheckpointError, match="4 bytes, more than the 3 allowed"):
        save(tmp_path, 1, sample_states(), companions={"a": b"1234"})


def test_a_run_without_weights_or_optimizer_can_be_saved(tmp_path):
    folder = save(tmp_path, 0, {"trainer": Holder({"global_step": 0})})
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "state.json"]
    assert verify(folder, full=True).ok


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"cannot save .*checkpoint-1: .*not a folder"):
        save(tmp_path / "file", 1, sample_states())


def test_versions_are_told_even_of_what_is_not_installed(monkeypatch):
    monkeypatch.setattr(sys.modules[save.__module__], "LIBRARIES", ("torch", "no-such-library"))
    from surefoot.checkpoint.saving.preparation import versions

    assert versions()["no-such-library"] == "unknown"
