"""The page that specifies the format is exact: the reader printed on it reads what we write."""

import json
import math
import re
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import deserialize

from damage import flip
from surefoot.checkpoint.disk import manifest as index
from surefoot.checkpoint.disk._bytes import raw
from surefoot.checkpoint.disk.tensorfile import ITEM_SIZES
from surefoot.checkpoint.saving._writing import WriteShare, write
from surefoot.checkpoint.saving.preparation import LiveTensors, WriterGroup, prepare, save
from surefoot.parallel.sharding import Box

from .gridded import gridded
from .sample import sample_states
from .test_distributed import halves, saved_by_ranks

PAGE = Path(__file__).parent.parent.parent / "docs" / "checkpoint-format.md"


@pytest.fixture
def read():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {}
    exec(code, names)
    return names["read"]


@pytest.mark.parametrize("layout", ["full", "distributed", "halves", "shared", "rules"])
@pytest.mark.parametrize("limit", [5_000_000_000, 500])
def test_the_reader_on_the_page_reads_a_checkpoint(tmp_path, read, limit, layout):
    states = sample_states()
    options = {"companions": {"config.json": b"{}"}, "max_shard_size": limit}
    if layout == "halves":
        folder = saved_by_ranks(tmp_path, states, halves)
    elif layout == "shared":
        folder = saved_by_halves(tmp_path, states)
    elif layout == "rules":
        folder = gridded(save(tmp_path, 1, states), tmp_path / "many")
    else:
        folder = save(tmp_path, 1, states, writers=WriterGroup(layout), **options)
    tensors, state = read(folder)
    for name, tensor in states["model"].state.items():
        dtype, shape, values = tensors[f"model/{name}"]
        assert values == bytes(raw(tensor)) and shape == list(tensor.shape)
        assert len(values) == tensor.numel() * ITEM_SIZES[dtype]
    pointer = state["optimizer"]["model.norm.weight"]["exp_avg"]["$tensor"]
    moment = states["optimizer"].state["model.norm.weight"]["exp_avg"]
    assert tensors[f"optimizer/{pointer}"][2] == bytes(raw(moment))
    assert tensors["state/" + state["random"]["torch"]["$tensor"]][2] == bytes(
        raw(states["random"].state["torch"])
    )
    assert state["trainer"]["best_metric"] == {"$float": "inf"}


def strangers_reader(folder):
    """The tensors by name, as (dtype, shape, bytes), read by the page alone, without hashes."""
    manifest = json.loads((folder / "manifest.json").read_text())
    axes, mesh = manifest["axes"], manifest["mesh"]
    names = [name for name in manifest["files"] if name.endswith(".safetensors")]
    files = {name: dict(deserialize((folder / name).read_bytes())) for name in names}
    tensors = {}

    def put(tensor, start, shape, stored):
        size = len(stored["data"]) // max(1, math.prod(shape))
        values = np.frombuffer(stored["data"], np.uint8).reshape(*shape, size)
        whole = np.zeros((*tensor["shape"], size), np.uint8)
        whole = tensors.setdefault(tensor["tensor"], (tensor["dtype"], tensor["shape"], whole))[2]
        whole[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))] = values

    for piece in manifest["pieces"]:
        put(piece, *piece["box"], files[piece["file"]][piece["key"]])
    for rank in range(math.prod(mesh.values())):
        place = dict(zip(axes, np.unravel_index(rank, [mesh[a] for a in axes]), strict=True))
        listed = json.loads((folder / f"rank_{rank:05d}/hashes.json").read_text())
        file_of = {tensor: file for file, hashes in listed.items() for tensor in hashes}
        for rule in manifest["rules"]:
            start, shape = [0] * len(rule["shape"]), list(rule["shape"])
            left = {axis: at for axis, at in place.items() if axis != "pp"}
            for axis, dim in rule["cuts"]:
                chunk = math.ceil(shape[dim] / mesh[axis])
                first = min(left.pop(axis) * chunk, shape[dim])
                start[dim] += first
                shape[dim] = min(chunk, shape[dim] - first)
            is_empty = 0 in shape and 0 not in rule["shape"]
            if place.get("pp", 0) != rule["stage"] or any(left.values()) or is_empty:
                assert rule["tensor"] not in file_of
                continue
            file = f"rank_{rank:05d}/{file_of[rule['tensor']]}"
            put(rule, start, shape, files[file][rule["tensor"].split("/", 1)[1]])
    return {name: (dtype, shape, v.tobytes()) for name, (dtype, shape, v) in tensors.items()}


def test_a_reader_that_has_only_the_page_reads_the_same(tmp_path, read):
    whole = save(tmp_path, 1, sample_states())
    assert strangers_reader(gridded(whole, tmp_path / "many")) == read(whole)[0]


def saved_by_halves(root, states):
    """By two that share the files: as one has it, whose every write is of a half."""
    job, live = prepare(root, 7, states)
    written = []
    for at in range(2):
        shards, groups = [], {}
        for shard in job.shards:
            entries = shard.plan.header.entries.items()
            boxes = {n: halves(e.shape)[at] for n, e in entries if at < len(halves(e.shape))}
            shards.append(replace(shard, share=WriteShare(boxes, has_head=not at)))
            groups[shard.role] = {
                n: live.groups[shard.role][n][box.slices_in(Box.whole(entry.shape))]
                for n, box in boxes.items()
                for entry in [shard.plan.header.entries[n]]
            }
        made = replace(job, shards=shards, rank=at, world_size=2, nonce="0badcafe")
        written.append((replace(made, small={} if at else job.small), LiveTensors(groups)))
    thread = threading.Thread(target=lambda: write(*written[1]))
    thread.start()
    saved = write(*written[0])
    thread.join()
    return saved.path


@pytest.mark.parametrize("name", ["hashes.json", "model.safetensors"])
def test_the_reader_on_the_page_finds_damage_behind_rules(tmp_path, read, name):
    folder = gridded(save(tmp_path, 1, sample_states()), tmp_path / "many")
    flip(folder / "rank_00001" / name, -40)
    with pytest.raises((AssertionError, ValueError, KeyError)):
        read(folder)


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "state.json"])
def test_the_reader_on_the_page_finds_damage(tmp_path, read, name):
    folder = save(tmp_path, 1, sample_states())
    flip(folder / name, -40)
    with pytest.raises((AssertionError, ValueError, KeyError)):
        read(folder)


def test_the_page_names_every_key_and_every_type(tmp_path):
    page = PAGE.read_text()
    folder = save(tmp_path, 1, sample_states())
    manifest = json.loads((folder / "manifest.json").read_text())
    assert all(f"`{key}`" in page for key in manifest)
    many = json.loads((gridded(folder, tmp_path / "many") / "manifest.json").read_text())
    assert all(f"`{key}`" in page for key in many)
    assert all(f'"{key}"' in page for key in (*manifest["pieces"][0], *many["rules"][0]))
    assert all(name in page for name in ITEM_SIZES)
    assert f'`"{".".join(map(str, index.VERSION))}"`' in page
