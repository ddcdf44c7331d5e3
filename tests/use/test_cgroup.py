"""A real limit of a container: an automatic micro-batch stays within it, a larger one is killed."""

import json
import os
import signal
from pathlib import Path

import pytest

from project import Project, in_child, losses, model_folder
from surefoot.recipe.recipe import load
from surefoot.run.training_run import run
from surefoot.storage.memory import free_memory
from surefoot.use.estimate.plan import choose_settings

ROOTS = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]
LIMITS = {ROOTS[0]: "memory.limit_in_bytes", ROOTS[1]: "memory.max"}
LIMIT = 500 * 2**20

pytestmark = pytest.mark.proof


@pytest.fixture
def cgroup():
    """The file that takes a process into a group with so much memory."""
    for root in ROOTS:
        folder = root / f"surefoot-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / LIMITS[root]).write_text(str(LIMIT))
            yield folder / "cgroup.procs"
            return
        except OSError:  # version 2 without the controller for memory
            continue
        finally:
            folder.rmdir()
    pytest.skip("no control group can be made here")


def test_an_automatic_size_stays_within_the_limit_of_a_container(cgroup, tmp_path):
    train = {"global_batch_size": 16, "max_steps": 2, "precision": "fp32"}
    data = {"cutoff_len": 128, "packing": False}
    made = Project(tmp_path, train=train, data=data, checkpoint={"async_save": False})
    model_folder(tmp_path / "model", intermediate_size=16_384)
    row = {"instruction": "What is it?", "output": "It is one, said the hen. " * 9}
    (tmp_path / "data" / "sums.jsonl").write_text(f"{json.dumps(row)}\n" * 32)

    def train_with(size, folder):
        def work():
            cgroup.write_text(str(os.getpid()))
            assert free_memory() <= LIMIT
            changes = [f"train.micro_batch_size={size}", f"train.output_dir={tmp_path / folder}"]
            run(load(made.recipe, changes), choose=choose_settings)

        return in_child(work)

    assert train_with(16, "large") == -signal.SIGKILL
    assert train_with("auto", "auto") == 0
    chosen = load(tmp_path / "auto").train.micro_batch_size
    assert 1 <= chosen < 16
    assert losses(tmp_path / "auto").keys() == {1, 2}
