"""What fits in a memory: no more, and not less than could."""

import resource
from dataclasses import replace
from functools import cache

import pytest

from project import Project, in_child
from surefoot.errors import RecipeError
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import MemorySettings, load
from surefoot.run.training_run import run
from surefoot.storage.memory import free_memory
from surefoot.training.section import TrainSection
from surefoot.use.estimate import plan as fitting
from surefoot.use.estimate._rank_memory import Machine
from surefoot.use.estimate.plan import (
    RECOMPUTE,
    changed,
    choose_settings,
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
    trial = cache(fitting.Trial.of)  # which are the same again
    monkeypatch.setattr(fitting.Trial, "of", trial)
    need = [trial(asked, GPU, policy).peak(16) for policy in ("none", "selective", "offload")]
    assert need == sorted(need, reverse=True)
    assert len(set(need)) == 3
    found = fastest_fit(asked, GPU, for_model(need[1]))
    assert (found.policy, found.micro_batch_size) == ("selective", 16)
    adapted = loaded(project, "method=lora")
    assert fitting.policies_on(adapted, GPU) == ["none", "full", "offload"]
    with pytest.raises(RecipeError, match="selective would keep products to which an adapter"):
        peak(changed(adapted, {RECOMPUTE: "selective"}), GPU)
    assert fitting.policies_on(asked, Machine(1, on_gpu=False)) == ["none", "selective", "full"]


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
    run(recipe, choose=choose_settings)
    assert "train.micro_batch_size: 16 (auto: " in caplog.text
    kept = load(tmp_path / "run").train.micro_batch_size
    assert kept == 16
    longer = loaded(
        project,
        "train.micro_batch_size=auto",
        f"train.output_dir={tmp_path / 'run'}",
        "train.max_steps=3",
    )
    outcome = run(longer, choose=lambda *_: MemorySettings(1, "full"))
    assert outcome.state.train_batch_size == 16
    assert outcome.global_step == 3


AUTO = "model.gradient_checkpointing=auto"


def test_the_cheapest_policy_that_fits_is_chosen_once_said_and_kept(
    project, tmp_path, caplog, monkeypatch
):
    caplog.set_level("INFO")
    own = f"train.output_dir={tmp_path / 'run'}"
    machine = Machine(1, on_gpu=False)
    needed = fitting.Trial.of(loaded(project, AUTO), machine, "selective").peak(4)
    monkeypatch.setattr(fitting, "available", lambda _: for_model(needed, machine))
    with pytest.raises(RecipeError, match="auto is chosen by `surefoot train` alone; set none"):
        run(loaded(project, AUTO, own))
    run(loaded(project, AUTO, own), choose=choose_settings)
    assert "model.gradient_checkpointing: selective (auto: " in caplog.text
    assert load(tmp_path / "run").model.gradient_checkpointing == "selective"
    monkeypatch.setattr(fitting, "available", lambda _: 10**12)  # where none would fit
    caplog.clear()
    outcome = run(loaded(project, AUTO, own, "train.max_steps=3"), choose=choose_settings)
    assert outcome.global_step == 3
    assert load(tmp_path / "run").model.gradient_checkpointing == "selective"
    assert "gradient_checkpointing" not in caplog.text  # neither chosen nor changed


@pytest.mark.parametrize(
    ("free", "policy", "line"),
    [
        (10**12, "none", "none (auto: "),
        (1000, "full", "which takes the least memory"),
        (None, "full", "how much memory is free is not known on this system"),
    ],
)
def test_auto_has_an_answer_whatever_is_free(project, caplog, monkeypatch, free, policy, line):
    caplog.set_level("INFO")
    monkeypatch.setattr(fitting, "available", lambda _: free)
    found = choose_settings(loaded(project, AUTO), ALONE)
    assert found == MemorySettings(4, policy)
    assert line in caplog.text


def test_what_reads_values_is_recomputed_as_its_memory_is_not_known(project, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(fitting, "available", lambda _: 10**12)
    staged = loaded(project, AUTO, "parallel.pp=2")
    world = replace(ALONE, size=2)
    assert choose_settings(staged, world).gradient_checkpointing == "full"
    assert "the run is a pipeline" in caplog.text


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
