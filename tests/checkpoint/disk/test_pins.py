import json

import pytest

from project import Project, checkpoints, surefoot
from surefoot.checkpoint.disk.retention import NAME, pin, pinned
from surefoot.errors import CheckpointError


def steps(run):
    return [int(path.name.removeprefix("checkpoint-")) for path in checkpoints(run)]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    kept = {"save_steps": 2, "keep": 1}
    found = Project(tmp_path_factory.mktemp("pins"), train={"max_steps": 4}, checkpoint=kept)
    assert surefoot("train", found.recipe, "checkpoint.keep=5")[0] == 0
    assert steps(found.run) == [2, 4]
    return found


def test_neither_a_run_nor_prune_deletes_a_pinned_checkpoint(project):
    code, out, _ = surefoot("ckpt", "pin", project.run / "checkpoint-2", "--json")
    assert (code, json.loads(out)) == (0, {"pinned": [2]})
    assert surefoot("train", project.recipe, "train.max_steps=8")[0] == 0  # checkpoint.keep=1
    assert steps(project.run) == [2, 4, 8], "4 is the one that it resumed from"
    code, out, _ = surefoot("ckpt", "prune", project.run, "--yes", "--json")
    assert code == 0
    found = {one["step"]: one["why"] for one in json.loads(out)["checkpoints"]}
    assert found[2] == ["pinned"]
    assert steps(project.run) == [2, 8]
    assert pin(project.run, 2, is_pinned=False) == set()
    assert surefoot("ckpt", "prune", project.run, "--yes", "--json")[0] == 0
    assert steps(project.run) == [8]


def test_only_a_checkpoint_can_be_pinned_and_a_broken_file_deletes_nothing(project):
    with pytest.raises(CheckpointError, match="has no checkpoint-3"):
        pin(project.run, 3, is_pinned=True)
    code, _, said = surefoot("ckpt", "pin", project.run)
    assert (code, "expected a checkpoint" in said) == (2, True)
    for text in ("[1,", '{"a": 1}', "[true]"):
        (project.run / NAME).write_text(text)
        with pytest.raises(CheckpointError, match="repair or delete"):
            pinned(project.run)
    assert surefoot("ckpt", "prune", project.run, "--yes")[0] == 2
    (project.run / NAME).unlink()
