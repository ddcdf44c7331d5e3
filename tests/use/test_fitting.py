"""What fits in a memory: no more, and not less than could."""

import resource
from functools import cache

import pytest

from project import Project, in_child
from surefoot.errors import RecipeError
from surefoot.recipe.recipe import load
from surefoot.run.training_run import run
from surefoot.storage.memory import free_memory
from surefoot.training.section import TrainSection
from surefoot.use.estimate import plan as fitting
from surefoot.use.estimate._rank_memory import Machine
from surefoot.use.estimate.plan import (
    RECOMPUTE,
    changed,
    choose_micro_batch_size,
    fastest_fit,
    largest_fit,
    make_plan,
)

GPU = Machine(1, on_gpu=True)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Its logits and activations weigh more than its weights."""
    folder = tmp_path_factory.mktemp("fitting")
    train = {"max_steps": 2, "global_batch_size": 16, "micro_batch_size": 4, "precision": "fp32"}
    return Project(folder, train=train, checkpoint={"async_save": False})


def loaded(project, *overrides):
    return load(project.recipe, ["data.train_on_prompt=true", *overrides])


def peak(recipe, machine):
    return make_plan(recipe, machine).memory.peak


def for_model(size, machine=GPU):
    """The memory of which so much is left for the model."""
    return int((size + fitting._RUNTIME * machine.on_gpu) / (1 - fitting.SPARE)) + 1


def test_the_largest_micro_batch_that_fits_is_the_largest_that_plan_says_fits(project):
    needed = peak(loaded(project, "train.micro_batch_size=2"), GPU)
    found = largest_fit(loaded(project), GPU, for_model(needed))
    assert (found.micro_batch_size, found.num_bytes) == (2, needed)
    alone = ("train.global_batch_size=1", "train.micro_batch_size=1")  # one dry run
    assert largest_fit(loaded(project, *alone), GPU, 10**6) is None


def test_the_fastest_policy_with_which_the_recipe_fits_is_chosen(project, monkeypatch):
    asked = loaded(project, "train.micro_batch_size=16")
    trial = cache(fitting._Trial.of)  # which are the same again
    monkeypatch.setattr(fitting._Trial, "of", trial)
    need = [trial(asked, GPU, policy).peak(16) for policy in ("none", "selective", "offload")]
    assert need == sorted(need, reverse=True)
    assert len(set(need)) == 3
    found = fastest_fit(asked, GPU, for_model(need[1]))
    assert (found.policy, found.micro_batch_size) == ("selective", 16)
    adapted = loaded(project, "method=lora")
    assert fitting._policies(adapted, GPU) == ["none", "full", "offload"]
    with pytest.raises(RecipeError, match="selective would keep products to which an adapter"):
        peak(changed(adapted, {RECOMPUTE: "selective"}), GPU)
    assert fitting._policies(asked, Machine(1, on_gpu=False)) == ["none", "selective", "full"]


def test_settings_of_a_section_change_together(project):
    made = loaded(project, "parallel.num_processes=4")
    found = changed(made, {"parallel.dp_shard": 2, "parallel.tp": 2, RECOMPUTE: "full"})
    assert (found.parallel.dp_shard, found.parallel.tp) == (2, 2)
    assert found.model.gradient_checkpointing == "full"
    assert made.model.gradient_checkpointing == "none"


def test_an_automatic_size_is_chosen_once_said_and_kept(project, tmp_path, caplog):
    caplog.set_level("INFO")
    recipe = loaded(project, "train.micro_batch_size=auto", f"train.output_dir={tmp_path / 'run'}")
    with pytest.raises(RecipeError, match="auto is chosen by `surefoot train` alone"):
        run(recipe)
    run(recipe, choose=choose_micro_batch_size)
    assert "train.micro_batch_size: 16 (auto: " in caplog.text
    kept = load(tmp_path / "run").train.micro_batch_size
    assert kept == 16
    longer = loaded(
        project,
        "train.micro_batch_size=auto",
        f"train.output_dir={tmp_path / 'run'}",
        "train.max_steps=3",
    )
    outcome = run(longer, choose=lambda *_: 1)
    assert outcome.state.train_batch_size == 16
    assert outcome.global_step == 3


def test_a_size_is_a_number_or_auto(project):
    with pytest.raises(RecipeError, match=r"micro_batch_size: .*'many'"):
        loaded(project, "train.micro_batch_size=many")
    with pytest.raises(RecipeError, match="auto is chosen by"):
        _ = TrainSection(output_dir="run", micro_batch_size="auto").gradient_accumulation_steps


def test_a_limit_of_this_process_is_a_limit_of_memory():
    def work():
        pages = int(open("/proc/self/statm").read().split()[0])  # noqa: PTH123, SIM115
        resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + 10**8, -1))
        assert 0 <= free_memory() <= 10**8

    assert in_child(work) == 0
