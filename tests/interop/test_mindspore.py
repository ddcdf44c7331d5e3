"""MindSpore itself reads what we write, and we what it writes; ``make interop`` runs this."""

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from folders import save_model, save_recipe
from plugins.mindspore.real import copied, real  # noqa: F401 - fixtures
from surefoot.checkpoint.disk._bytes import raw
from surefoot.checkpoint.layouts.detection import open_contents, shown
from surefoot.checkpoint.sources import FolderSource, read_whole
from surefoot.plugins.mindspore.resume import load_mindspore_checkpoint
from surefoot.plugins.mindspore.target import MindSporeFolder
from surefoot.plugins.mindspore.tensor_layout import ParallelConfig
from surefoot.recipe.recipe import load
from surefoot.run.training_run import build, run
from surefoot.use.exporting.conversion import convert

PYTHON = os.environ.get("MINDSPORE_PYTHON")
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs MINDSPORE_PYTHON; see make interop")

CUTS = {
    "mp2": ParallelConfig(1, 2),
    "dp2mp2": ParallelConfig(2, 2, vocab_emb_dp=False),
    "dp2mp2 with shards": ParallelConfig(
        2, 2, enable_parallel_optimizer=True, parallel_optimizer_threshold=0
    ),
    "pp2mp2": ParallelConfig(1, 2, 2),
}
NAMES = {"qwen2": "legacy-fused", "qwen3": "mcore-fused"}


def theirs(task, **arguments):
    told = json.dumps({name: str(value) for name, value in arguments.items()})
    command = [PYTHON, Path(__file__).with_name("theirs.py"), task, told]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=clean)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def digest(tensor):
    return hashlib.sha256(raw(tensor.contiguous())).hexdigest()


def ours(folder):
    contents = open_contents(folder)
    source = FolderSource(contents)
    return {
        shown(name).removeprefix("optimizer/").removeprefix("state/"): digest(
            read_whole(source, name)
        )
        for name in contents.tensors
    }


def only_hashes(found):
    return {name: entry[2] for name, entry in found.items()}


@pytest.fixture(scope="module", params=["qwen2 float32", "qwen3 bfloat16"])
def model(request, tmp_path_factory):
    kind, dtype = request.param.split()
    sizes = {
        "vocab_size": 260,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    folder = tmp_path_factory.mktemp("model")
    return save_model(folder / kind, kind, dtype=getattr(torch, dtype), **sizes), NAMES[kind]


def test_whole_weights_are_read_bitwise_and_fill_a_net(model, tmp_path):
    folder, names = model
    convert(folder, tmp_path / "full", MindSporeFolder(names=names))
    assert only_hashes(theirs("hashes", folder=tmp_path / "full")) == ours(tmp_path / "full")
    told = theirs("into_net", folder=tmp_path / "full")
    assert told == {"missing": [], "unknown": [], "same": True}


@pytest.mark.parametrize("cut", CUTS)
def test_their_merge_of_our_slices_is_the_whole(model, tmp_path, cut):
    folder, names = model
    wanted = MindSporeFolder(layout="distributed", parallel_config=CUTS[cut], names=names)
    convert(folder, tmp_path / "cut", wanted)
    convert(folder, tmp_path / "full", MindSporeFolder(names=names))
    found = theirs(
        "merge", source=tmp_path / "cut/checkpoint", strategy=tmp_path / "cut/strategy",
        target=tmp_path / "merged",
    )  # fmt: skip
    assert only_hashes(found) == ours(tmp_path / "full") == ours(tmp_path / "merged")


@pytest.mark.parametrize("cut", CUTS)
def test_their_cut_by_our_strategy_is_ours(model, tmp_path, cut):
    folder, names = model
    convert(
        folder,
        tmp_path / "cut",
        MindSporeFolder(layout="distributed", parallel_config=CUTS[cut], names=names),
    )
    convert(folder, tmp_path / "full", MindSporeFolder(names=names))
    found, expected = theirs(
        "cut", source=tmp_path / "full", strategy=tmp_path / "cut/strategy",
        target=tmp_path / "theirs", ours=tmp_path / "cut/checkpoint",
    )  # fmt: skip
    assert len(found) == CUTS[cut].world_size
    assert found == expected


@pytest.fixture(scope="module", params=["qwen3_moe mcore-fused", "mixtral legacy"])
def mixture(request, tmp_path_factory):
    kind, names = request.param.split()
    return save_model(tmp_path_factory.mktemp("mixture") / kind, kind, num_hidden_layers=2), names


def test_a_mixture_of_experts_fills_a_net_and_survives_their_merge(mixture, tmp_path):
    folder, names = mixture
    convert(folder, tmp_path / "full", MindSporeFolder(names=names))
    told = theirs("into_net", folder=tmp_path / "full")
    assert told == {"missing": [], "unknown": [], "same": True}
    shards = ParallelConfig(2, enable_parallel_optimizer=True, parallel_optimizer_threshold=0)
    convert(
        folder,
        tmp_path / "cut",
        MindSporeFolder(layout="distributed", parallel_config=shards, names=names),
    )
    found = theirs(
        "merge", source=tmp_path / "cut/checkpoint", strategy=tmp_path / "cut/strategy",
        target=tmp_path / "merged",
    )  # fmt: skip
    assert only_hashes(found) == ours(tmp_path / "full")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of a run of ours."""
    folder = tmp_path_factory.mktemp("run")
    saves = {"save_steps": 2, "async_save": False}
    path = save_recipe(folder, train={"max_steps": 2, "eval_steps": None}, checkpoint=saves)
    run(load(path))
    return folder


def test_moments_of_a_run_fill_their_net_and_come_back_into_a_run(trained, tmp_path):
    checkpoint = trained / "run" / "checkpoint-2"
    convert(
        checkpoint,
        tmp_path / "cut",
        MindSporeFolder(layout="distributed", parallel_config=CUTS["dp2mp2 with shards"]),
    )
    found = theirs(
        "merge", source=tmp_path / "cut/checkpoint", strategy=tmp_path / "cut/strategy",
        target=tmp_path / "merged",
    )  # fmt: skip
    assert {"adam_m.lm_head.weight", "adam_v.lm_head.weight", "step_num"} <= found.keys()
    told = theirs("into_net", folder=tmp_path / "merged")
    assert told == {"missing": [], "unknown": [], "same": True}
    made = build(load(trained / "recipe.yaml"))
    load_mindspore_checkpoint(tmp_path / "merged", made, base=trained / "model")
    assert made.state.global_step == 2
    whole = FolderSource(open_contents(checkpoint))
    for name, tensor in made.policy.weights.state_dict().items():
        assert torch.equal(tensor, read_whole(whole, f"model/{name}"))
    for name, slots in made.policy.optimizer_state.state_dict().items():
        for slot, tensor in slots.items():
            assert torch.equal(tensor, read_whole(whole, f"optimizer/{name}.{slot}"))


def test_training_state_survives_their_merge(real, tmp_path):  # noqa: F811
    wanted = MindSporeFolder(layout="distributed", parallel_config=CUTS["dp2mp2 with shards"])
    convert(real / "pp2mp2", tmp_path / "cut", wanted)
    found = theirs(
        "merge", source=tmp_path / "cut/checkpoint", strategy=tmp_path / "cut/strategy",
        target=tmp_path / "merged",
    )  # fmt: skip
    assert only_hashes(found) == ours(real / "pp2mp2")


def test_we_read_every_type_they_write(tmp_path):
    found = only_hashes(theirs("save", target=tmp_path / "theirs"))
    assert len(found) == 8
    assert ours(tmp_path / "theirs") == found
