"""What lies in a folder of weights, or why it cannot be read and what to do."""

import json
import re
import shlex
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

import warm
from surefoot.checkpoint.layouts.detection import detect_layout, open_weights
from surefoot.checkpoint.layouts.opening import read_named, scattered
from surefoot.checkpoint.saving.preparation import save
from surefoot.errors import CheckpointError

from ..sample import Holder, sample_states


def shards(folder, index=None):
    save_file({"a": torch.ones(2)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(3)}, folder / "model-00002-of-00002.safetensors")
    names = index or {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize("name", [".metadata", "pytorch_model_fsdp_0"])
def test_a_pickled_distributed_checkpoint_is_refused_with_the_command_that_converts_it(
    name, tmp_path
):
    (tmp_path / name).touch()
    assert detect_layout(tmp_path) is None
    command = f"surefoot ckpt convert {tmp_path} OUT --to huggingface --trust-pickle"
    told = f"`{command}` converts it to a model"
    with pytest.raises(CheckpointError, match=re.escape(told)):
        open_weights(tmp_path)


def test_kinds_of_folders(tmp_path):
    for name in ("empty", "whole", "shards", "adapter", "both"):
        (tmp_path / name).mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "whole" / "model.safetensors")
    shards(tmp_path / "shards")
    save_file({"w": torch.ones(1)}, tmp_path / "adapter" / "adapter_model.safetensors")
    for name in ("model", "adapter_model"):
        save_file({"w": torch.ones(1)}, tmp_path / "both" / f"{name}.safetensors")
    native = save(tmp_path, 1, sample_states())
    found = {p.name: (found := detect_layout(p)) and found.name for p in tmp_path.iterdir()}
    assert found == {
        "empty": None, "whole": "huggingface", "shards": "huggingface", "adapter": "peft",
        "both": "huggingface", "checkpoint-1": "native",
    }  # fmt: skip
    assert open_weights(native).tensors.keys() == sample_states()["model"].state.keys()
    assert set(open_weights(tmp_path / "shards").tensors) == {"a", "b"}


def test_a_checkpoint_without_its_manifest_is_no_model_of_others(tmp_path):
    folder = save(tmp_path, 1, sample_states())
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="never committed: it has no manifest"):
        open_weights(folder)


def test_the_whole_file_wins_over_an_index_as_in_transformers(tmp_path):
    shards(tmp_path)
    save_file({"c": torch.ones(1)}, tmp_path / "model.safetensors")
    assert set(open_weights(tmp_path).tensors) == {"c"}


def test_links_are_followed_in_folders_of_others_as_the_hubs_cache_is_made_of_them(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "blobs" / "abc")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/abc")
    assert set(open_weights(tmp_path / "snapshot").tensors) == {"w"}


def test_an_index_that_promises_what_is_not_there_is_refused(tmp_path):
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    shards(tmp_path, {"a": one, "b": two, "c": two})
    with pytest.raises(CheckpointError, match="according to the index, 'c' must be in this file"):
        open_weights(tmp_path)
    shards(tmp_path, {"a": two, "b": one})
    with pytest.raises(CheckpointError, match="according to the index, 'a' must be in this file"):
        open_weights(tmp_path)
    (tmp_path / two).unlink()
    with pytest.raises(CheckpointError, match=rf"{two}: it does not exist"):
        open_weights(tmp_path)


def test_a_tensor_in_two_files_is_the_one_that_the_index_names(tmp_path):
    shards(tmp_path)
    assert scattered(tmp_path) is None
    two = tmp_path / "model-00002-of-00002.safetensors"
    save_file({"b": torch.ones(3), "a": torch.zeros(2)}, two)
    assert open_weights(tmp_path).tensors["a"].file.path.name == "model-00001-of-00002.safetensors"
    assert torch.equal(scattered(tmp_path)["a"], torch.ones(2))
    shards(tmp_path, {"a": two.name, "b": two.name})
    save_file({"b": torch.ones(3), "a": torch.zeros(2)}, two)
    assert torch.equal(read_named(tmp_path)["a"], torch.zeros(2))


def test_a_tensor_in_two_files_of_which_the_index_names_none_is_refused(tmp_path):
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    shards(tmp_path, {"x": one, "y": two})
    for file, name in ((one, "x"), (two, "y")):
        save_file({name: torch.ones(3), "a": torch.ones(2)}, tmp_path / file)
    with pytest.raises(
        CheckpointError, match=r"'a' is in model-00001-of-00002.safetensors as well"
    ):
        open_weights(tmp_path)


def test_a_folder_without_weights_says_what_was_expected(tmp_path):
    with pytest.raises(CheckpointError, match=r"contains no weights; expected model\.safetensors"):
        open_weights(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_weights(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        open_weights(tmp_path / "file")


@pytest.mark.parametrize("size", ["1KB", "1GB"], ids=["shards", "one file"])
def test_a_variant_of_transformers_is_named_with_the_command_that_selects_it(size, tmp_path):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    model.save_pretrained(tmp_path, variant="fp16", max_shard_size=size)
    with pytest.raises(CheckpointError, match="only a variant of the weights") as refusal:
        open_weights(tmp_path)
    subprocess.run(str(refusal.value).rpartition("name: ")[2], shell=True, check=True)
    assert set(open_weights(tmp_path).tensors) == set(model.state_dict()) - {"lm_head.weight"}


def test_a_runs_folder_names_its_newest_checkpoint(tmp_path):
    for step in (1, 20, 3):
        save(tmp_path, step, {"model": Holder({})})
    with pytest.raises(CheckpointError, match=r"did you mean .*/checkpoint-20\?"):
        open_weights(tmp_path)


def command_for(folder):
    with pytest.raises(CheckpointError, match="can run code when it is read") as caught:
        open_weights(folder)
    found = re.search(r"tensors only: python (-c .*)$", str(caught.value))
    return [sys.executable, *shlex.split(found.group(1))]


@pytest.mark.parametrize(
    ("names", "target"),
    [
        (["pytorch_model.bin"], "model.safetensors"),
        (
            ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"],
            "model.safetensors",
        ),
        (["adapter_model.bin"], "adapter_model.safetensors"),
    ],
)
def test_the_command_that_a_refusal_names_converts_the_weights(tmp_path, names, target):
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    expected = {}
    for i, name in enumerate(names):
        tied = torch.randn(4, 3)
        tensors = {
            f"w{i}": tied,
            f"tied{i}": tied,
            f"t{i}": torch.randn(2, 5).t(),
            f"h{i}": torch.ones(1).bfloat16(),
        }
        torch.save(tensors, folder / name)
        expected |= tensors
    (folder / "training_args.bin").write_bytes(b"not to be touched")
    warm.run(command_for(folder), check=True)
    found = load_file(folder / target)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], t) for n, t in expected.items())
    assert set(open_weights(folder).tensors) == set(expected)


class Bomb:
    def __reduce__(self):
        return print, ("this ran",)


def test_the_command_runs_no_code_of_the_file(tmp_path):
    torch.save({"w": Bomb()}, tmp_path / "pytorch_model.bin")
    done = warm.run(command_for(tmp_path), capture_output=True, text=True)
    assert done.returncode != 0
    assert "this ran" not in done.stdout
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["consolidated.00.pth", "optimizer.pt", "model.ckpt"])
def test_other_pickles_are_refused_without_a_command(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=rf"{name}: .*with the tool that wrote it"):
        open_weights(tmp_path)
