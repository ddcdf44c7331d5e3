"""A measurement in a process of its own: figures, or why there are none."""

import pytest

import forks
from project import Project
from surefoot.errors import DataError, RunError
from surefoot.recipe.recipe import load
from surefoot.storage import child
from surefoot.use.bench._trial import TrialFailure, measured
from surefoot.use.bench.measurement import BenchResult


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path / "p")


def test_figures_come_back_whole(project):
    found = measured(load(project.recipe), 1)
    assert isinstance(found, BenchResult)
    assert found.steps == 1
    assert not project.run.exists()


def test_an_error_of_the_user_comes_back_as_one(project, monkeypatch):
    monkeypatch.setattr(child, "subprocess", forks)
    (project.folder / "data" / "sums.jsonl").unlink()
    found = measured(load(project.recipe), 1)
    assert isinstance(found, TrialFailure)
    assert isinstance(found.raised(), DataError)
    assert "sums" in str(found.raised())


def test_a_process_that_takes_too_long_is_ended(project):
    found = measured(load(project.recipe), 1, timeout=0.1)
    assert isinstance(found, TrialFailure)
    assert "not done after" in found.reason
    assert isinstance(found.raised(), RunError)


def test_a_crash_is_told_by_its_last_line(project, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setattr("sys.executable", "/bin/false")
    found = measured(load(project.recipe), 1)
    assert found == TrialFailure("ended with code 1")
