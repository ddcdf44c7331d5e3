"""Copies are whole or not there, equal to the source, split as asked, and need little memory."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from damage import flip
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.saving.preparation import save
from surefoot.checkpoint.sources import TensorsInMemory, copy
from surefoot.errors import CheckpointError
from surefoot.storage import files

from ..sample import Holder, same_bits, sample_states

TENSORS = dict(sample_states(scale=5)["model"].state)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("block", [1, 64, 16 << 20])
def test_a_copy_is_the_source(tmp_path, monkeypatch, block):
    monkeypatch.setattr(sys.modules[copy.__module__], "_BLOCK", block)
    told = []
    copy(TensorsInMemory(TENSORS), tmp_path / "new", progress=told.append)
    found = load_file(tmp_path / "new" / "model.safetensors")
    assert found.keys() == TENSORS.keys()
    assert all(same_bits(found[n], t) for n, t in TENSORS.items())
    assert sum(told) == sum(t.nbytes for t in TENSORS.values())
    assert names(tmp_path / "new") == ["model.safetensors"]


def test_a_copy_is_split_as_asked(tmp_path):
    copy(TensorsInMemory(TENSORS), tmp_path, max_shard_size=1000, stem="other")
    index = json.loads((tmp_path / "other.safetensors.index.json").read_text())
    held = {n: p.name for p in tmp_path.glob("other-*.safetensors") for n in load_file(p)}
    assert index["weight_map"] == held and len(set(held.values())) > 1
    assert set(held) == set(TENSORS)


def test_a_copy_is_cast_as_asked(tmp_path):
    copy(TensorsInMemory(TENSORS), tmp_path, dtype="float16")
    found = load_file(tmp_path / "model.safetensors")
    assert {n: t.dtype for n, t in found.items()} == {
        n: torch.float16 if t.is_floating_point() else t.dtype for n, t in TENSORS.items()
    }
    assert same_bits(found["model.norm.weight"], TENSORS["model.norm.weight"].half())


def test_a_dtype_that_is_none_is_refused(tmp_path):
    with pytest.raises(
        CheckpointError, match="dtype 'int8': expected one of float32, float16, bfloat16"
    ):
        copy(TensorsInMemory(TENSORS), tmp_path, dtype="int8")
    with pytest.raises(CheckpointError, match="w: cannot store"):
        copy(TensorsInMemory({"w": torch.ones(1, dtype=torch.complex128)}), tmp_path)


@pytest.mark.parametrize(
    "old", ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"]
)
def test_weights_that_are_there_are_never_overwritten(tmp_path, old):
    (tmp_path / old).write_bytes(b"precious")
    with pytest.raises(CheckpointError, match=f"{old}: it exists already; choose another folder"):
        copy(TensorsInMemory(TENSORS), tmp_path)
    assert names(tmp_path) == [old]


def test_a_damaged_source_leaves_no_copy(tmp_path):
    folder = save(tmp_path, 1, {"model": Holder(dict(TENSORS))})
    flip(folder / "model.safetensors", -2)
    with pytest.raises(CheckpointError, match="damaged"):
        copy(open_folder(folder), tmp_path / "new", max_shard_size=100)
    assert names(tmp_path / "new") == []


class Failing:
    """Writes end after so many bytes."""

    def __init__(self, room):
        self.room = room

    def __getattr__(self, name):
        return getattr(os, name)

    def pwrite(self, descriptor, data, offset):
        self.room -= len(data)
        if self.room < 0:
            raise OSError(28, "No space left on device")
        return os.pwrite(descriptor, data, offset)


@pytest.mark.parametrize("room", [0, 1000, 3000])
def test_a_full_disk_leaves_no_copy(tmp_path, monkeypatch, room):
    monkeypatch.setattr(files, "os", Failing(room))
    with pytest.raises(CheckpointError, match=r"cannot write weights to .*the disk is full"):
        copy(TensorsInMemory(TENSORS), tmp_path, max_shard_size=1000)
    assert names(tmp_path) == []


def test_what_a_killed_copy_left_is_removed_by_the_next(tmp_path):
    left = tmp_path / ".model.safetensors.00000000.part"
    left.write_bytes(b"half")
    alive = files.create(tmp_path / ".model-00001-of-00002.safetensors.11111111.part")
    assert alive.lock()  # another process is writing this one
    copy(TensorsInMemory(TENSORS), tmp_path)
    assert names(tmp_path) == [alive.path.name, "model.safetensors"]


MEASURE = """
import resource, sys
from pathlib import Path
from surefoot.checkpoint.sources import copy
from surefoot.checkpoint.layouts.opening import open_folder
source, target = map(Path, sys.argv[1:])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
copy(open_folder(source), target, dtype="float16", max_shard_size=100_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_model(tmp_path):
    (tmp_path / "old").mkdir()
    save_file(
        {f"w{i}": torch.zeros(16 << 20) for i in range(4)}, tmp_path / "old" / "model.safetensors"
    )  # 4 x 64 MiB
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "old"), str(tmp_path / "new")]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) << 10
    assert grown < 64 << 20
    assert len(list((tmp_path / "new").glob("*.safetensors"))) == 2
