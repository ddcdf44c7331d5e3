"""A run with two checkpoints saves a third and forgets the first; and what must hold then."""

import shutil
from dataclasses import replace

import torch

from checkpoint.sample import blank, same_states, sample_states, tree_bytes
from surefoot.checkpoint.disk.commit import clean, committed
from surefoot.checkpoint.disk.retention import drop_all
from surefoot.checkpoint.loading import load
from surefoot.checkpoint.saving._snapshot_buffer import FileImages, SnapshotBuffer, places
from surefoot.checkpoint.saving._writer_process import take
from surefoot.checkpoint.saving._writing import write
from surefoot.checkpoint.saving.preparation import prepare, save
from surefoot.checkpoint.verification import find_latest
from surefoot.errors import CheckpointError

OLD, NEW = (1, 2), 3
COMPANIONS = {"config.json": b"{}", "templates/chat.jinja": b"{{ messages }}"}


def states(step):
    """A model of which a part is frozen, so that its file is shared by all checkpoints."""
    made = sample_states(step)
    made["model"].state["model.frozen.weight"] = torch.arange(200.0)
    made["model"].state["model.layers.0.mask"] = torch.ones(5, dtype=torch.bool)
    return made


def set_up(root):
    """The run before: two checkpoints."""
    for step in OLD:
        save(root, step, states(step), companions=COMPANIONS)
    return {step: tree_bytes(root / f"checkpoint-{step}") for step in OLD}


def act(root):
    """What is interrupted: clean up, save a snapshot in shards, forget the oldest, clean up."""
    clean(root)
    job, live = prepare(
        root,
        NEW,
        states(NEW),
        companions=COMPANIONS,
        max_shard_size=900,
        parent="checkpoint-2",
    )
    job = replace(job, forget=["checkpoint-1"])
    starts, size = places([shard.plan.header.file_size for shard in job.shards])
    arena = SnapshotBuffer.create(size)
    images = FileImages(arena, starts, job.shards)
    take(images, live.groups)
    saved = write(job, images)
    arena.close()
    if saved.problem:
        raise CheckpointError(saved.problem)
    clean(root)


def check(root, before, finished=False):
    """The newest checkpoint is whole and loads, nothing old was touched, leftovers go."""
    found = find_latest(root)
    there = {int(p.name.split("-")[1]): p for p in committed(root)}
    assert found.path is not None, "no checkpoint left"
    assert found.passed_over == [], f"a damaged checkpoint: {found.passed_over}"
    newest = max(there)
    assert found.path == there[newest]
    assert newest == NEW or not finished, "a save that had returned is lost"
    assert 2 in there and (1 in there or newest == NEW), "forgotten before the new one was there"
    for step in there.keys() & before.keys():
        assert tree_bytes(there[step]) == before[step], f"checkpoint-{step} was touched"
    loaded = blank(states(newest))
    load(found.path, loaded)
    assert same_states(states(newest), loaded)
    clean(root)
    assert {p.name for p in root.iterdir()} == {p.name for p in there.values()}


def go_on(root):
    """The next start of the run saves the step again if it is not there, and ends as planned."""
    clean(root)
    if find_latest(root).path != root / f"checkpoint-{NEW}":
        act(root)
    drop_all(committed(root)[:-2])
    assert [p.name for p in committed(root)] == ["checkpoint-2", "checkpoint-3"]


def copy_of(root, target):
    shutil.copytree(root, target)
    return target
