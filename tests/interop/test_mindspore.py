"""MindSpore itself reads what we write, and we what it writes; ``make interop`` runs this."""

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from checkpoint.mindspore.real import copied, real  # noqa: F401 - fixtures
from folders import save_model
from surefoot.checkpoint.bytes import raw
from surefoot.checkpoint.contents import open_contents, shown
from surefoot.checkpoint.mindspore.parallel import ParallelConfig
from surefoot.checkpoint.mindspore.rewrite import Wanted
from surefoot.checkpoint.source import Stored, read_whole
from surefoot.inference.mindspore import write_mindspore

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
    source = Stored(contents)
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
    write_mindspore(folder, tmp_path / "full", Wanted(names=names))
    assert only_hashes(theirs("hashes", folder=tmp_path / "full")) == ours(tmp_path / "full")
    told = theirs("into_net", folder=tmp_path / "full")
    assert told == {"missing": [], "unknown": [], "same": True}


@pytest.mark.parametrize("cut", CUTS)
def test_their_merge_of_our_slices_is_the_whole(model, tmp_path, cut):
    folder, names = model
    wanted = Wanted("distributed", CUTS[cut], names=names)
    write_mindspore(folder, tmp_path / "cut", wanted)
    write_mindspore(folder, tmp_path / "full", Wanted(names=names))
    found = theirs(
        "merge", source=tmp_path / "cut/checkpoint", strategy=tmp_path / "cut/strategy",
        target=tmp_path / "merged",
    )  # fmt: skip
    assert only_hashes(found) == ours(tmp_path / "full") == ours(tmp_path / "merged")


@pytest.mark.parametrize("cut", CUTS)
def test_their_cut_by_our_strategy_is_ours(model, tmp_path, cut):
    folder, names = model
    write_mindspore(folder, tmp_path / "cut", Wanted("distributed", CUTS[cut], names=names))
    write_mindspore(folder, tmp_path / "full", Wanted(names=names))
    found, expected = theirs(
        "cut", source=tmp_path / "full", strategy=tmp_path / "cut/strategy",
        target=tmp_path / "theirs", ours=tmp_path / "cut/checkpoint",
    )  # fmt: skip
    assert len(found) == CUTS[cut].world_size
    assert found == expected


def test_training_state_survives_their_merge(real, tmp_path):  # noqa: F811
    wanted = Wanted("distributed", CUTS["dp2mp2 with shards"])
    write_mindspore(real / "pp2mp2", tmp_path / "cut", wanted)
    found = theirs(
        "merge", source=tmp_path / "cut/checkpoint", strategy=tmp_path / "cut/strategy",
        target=tmp_path / "merged",
    )  # fmt: skip
    assert only_hashes(found) == ours(real / "pp2mp2")


def test_we_read_every_type_they_write(tmp_path):
    found = only_hashes(theirs("save", target=tmp_path / "theirs"))
    assert len(found) == 8
    assert ours(tmp_path / "theirs") == found
