"""The steps that are measured are the run's own, and leave nothing behind."""

import json
import re

import pytest
import torch

import surefoot
from project import Project, metrics
from surefoot.errors import RunError
from surefoot.recipe.recipe import load
from surefoot.recipe.recipe_data import SingleRankRecipe
from surefoot.use import bench
from surefoot.use.bench import ENOUGH, PHASES, Meter


def measure(recipe, steps):
    return bench.measure(SingleRankRecipe.of(recipe), steps)


@pytest.fixture(autouse=True)
def _one_product(monkeypatch):
    """Of matrices, for the speed that this processor could reach; else it takes half a second."""
    monkeypatch.setattr("surefoot.use.bench._SECONDS", 0)


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path / "p", train={"max_steps": 3}, method={"lora": {"rank": 2}})


def test_the_figures_are_those_of_the_runs_first_steps(project, tmp_path):
    found = measure(load(project.recipe), 3)
    assert not project.run.exists()
    assert not list(tmp_path.rglob("checkpoint-*"))
    assert (found.steps, found.run_steps) == (3, 3)
    assert found.phases.keys() == set(PHASES)
    assert all(seconds > 0 for seconds in found.phases.values())
    assert sum(found.shares.values()) == pytest.approx(1)
    assert 0 < found.trained_tokens < found.tokens == found.positions
    assert found.compiling_seconds == 0
    assert found.used["precision"] == "fp32" and found.used["compilation"] == "off"
    assert found.used["weights"] == "trained: float32; frozen: float32"
    assert found.used["attention"] == "sdpa (packed)"
    assert found.used["output head"] == "chunked cross entropy"
    assert re.fullmatch(r"fused in \d+ layers", found.used["LoRA"])
    assert found.used["optimizer"] == "AdamW, fused"
    state = surefoot.train(project.recipe).state
    assert found.tokens == metrics(project.run)[-1]["num_input_tokens_seen"]
    assert found.flops == pytest.approx(state.total_flos)


def test_padding_is_counted(project, tmp_path):
    padded = load(project.recipe, ["data.packing=false", "train.micro_batch_size=4"])
    found = measure(padded, 1)
    assert found.steps == 1
    assert found.positions >= found.tokens


def test_the_first_step_runs_the_heaviest_pass(project, tmp_path, monkeypatch):
    seen = []
    long = {"instruction": "What is it?", "output": "It is 5. " * 20}
    with (project.folder / "data" / "sums.jsonl").open("a") as file:
        file.write(json.dumps(long) + "\n")
    count = Meter.count

    def spy(meter, window):
        seen.append(max(batch.num_tokens for batch in window))
        count(meter, window)

    monkeypatch.setattr(Meter, "count", spy)
    measure(load(project.recipe, ["train.num_epochs=1", "train.max_steps=null"]), 6)
    assert len(seen) == 8
    assert seen[0] == max(seen) > 80
    assert seen[1:].count(seen[0]) <= 1


def test_slow_steps_end_early(project, tmp_path, monkeypatch):
    monkeypatch.setattr("surefoot.use.bench.ENOUGH", 0.0)
    assert ENOUGH > 0
    assert measure(load(project.recipe), 5).steps == 1


def test_a_run_that_would_roll_back_is_measured_too(project, tmp_path):
    assert measure(load(project.recipe, ["train.on_nan=rollback"]), 1).steps == 1
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_what_would_be_streamed_is_measured_on_its_first_rows(project, tmp_path):
    stream = ["data.streaming=true", "data.buffer_size=8", "train.max_steps=100"]
    found = measure(load(project.recipe, stream), 1)
    assert (found.steps, found.run_steps) == (1, 100)


def test_of_pairs_no_reference_is_asked_for_its_speed(tmp_path):
    cache = tmp_path / "cache"
    data = {"datasets": ["pairs"], "cache_dir": str(cache)}
    project = Project(tmp_path / "p", stage="dpo", data=data)
    found = measure(load(project.recipe), 1)
    assert 0 < found.trained_tokens < found.tokens
    assert not (cache / "reference").exists()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_a_model_that_is_too_large_is_told_with_what_chooses_settings(project, error, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(bench, "build", fail)
    with pytest.raises(RunError, match=r"runs out of memory .*; `surefoot plan RECIPE --memory"):
        measure(load(project.recipe), 1)


def test_a_fault_of_the_program_stays_one(project, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(bench, "build", fail)
    with pytest.raises(RuntimeError, match="no such kernel"):
        measure(load(project.recipe), 1)
