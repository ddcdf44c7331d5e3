"""The page that specifies the format is exact: the reader printed on it reads what we write."""

import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from damage import flip
from surefoot.checkpoint.disk import manifest as index
from surefoot.checkpoint.disk._bytes import raw
from surefoot.checkpoint.disk.tensorfile import ITEM_SIZES
from surefoot.checkpoint.saving._writing import WriteShare, write
from surefoot.checkpoint.saving.preparation import LiveTensors, WriterGroup, prepare, save
from surefoot.parallel.sharding import Box

from .sample import sample_states
from .test_distributed import halves, saved_by_ranks

PAGE = Path(__file__).parent.parent.parent / "docs" / "checkpoint-format.md"


@pytest.fixture
def read():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {}
    exec(code, names)
    return names["read"]


@pytest.mark.parametrize("layout", ["full", "distributed", "halves", "shared"])
@pytest.mark.parametrize("limit", [5_000_000_000, 500])
def test_the_reader_on_the_page_reads_a_checkpoint(tmp_path, read, limit, layout):
    states = sample_states()
    options = {"companions": {"config.json": b"{}"}, "max_shard_size": limit}
    if layout == "halves":
        folder = saved_by_ranks(tmp_path, states, halves)
    elif layout == "shared":
        folder = saved_by_halves(tmp_path, states)
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
    assert all(f'"{key}"' in page for key in manifest["pieces"][0])
    assert all(name in page for name in ITEM_SIZES)
    assert f'`"{".".join(map(str, index.VERSION))}"`' in page
