"""The process of one measurement leaves a result, whatever happens."""

import json

import pytest
import torch

from project import Project
from surefoot.recipe.recipe import load
from surefoot.use.bench import _trial as trial


@pytest.fixture
def result(tmp_path):
    project = Project(tmp_path / "p")
    assert load(project.recipe)
    return project.recipe, tmp_path / "result.json"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_want_of_memory_is_a_result(result, error, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(trial, "measure", fail)
    recipe, file = result
    trial.main(recipe, 1, file)
    assert json.loads(file.read_text()) == {"failure": "out of memory"}


def test_a_fault_of_the_program_stays_one(result, monkeypatch):
    def fail(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(trial, "measure", fail)
    with pytest.raises(RuntimeError, match="no such kernel"):
        trial.main(result[0], 1, result[1])
