"""``surefoot launch``: checks before anything is submitted, and the engine's own program."""

import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

import commands
from project import Project, assert_same, final_weights, losses
from surefoot.errors import RecipeError
from surefoot.plugins.launch.request import LaunchRequest, check_ranks
from surefoot.recipe.recipe import load

FAKE = Path(__file__).parent / "fake_slurm.py"
run, ok, refused = commands.of("launch")


@pytest.fixture
def project(tmp_path, monkeypatch):
    project = Project(tmp_path / "project")
    monkeypatch.chdir(project.folder)
    return project


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder of programs that are found first."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def put(name, text):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

    return put


@pytest.fixture
def slurm(programs, tmp_path, monkeypatch):
    for name in ("sbatch", "srun", "scontrol"):
        programs(name, FAKE.read_text())
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FAKE_STATE", str(tmp_path))
    monkeypatch.setenv("FAKE_TASKS", "2")
    return lambda: [int(code) for code in (tmp_path / "starts").read_text().split()]


def test_what_is_printed_is_what_the_program_gets_and_its_exit_code_is_that_of_the_command(
    project, programs, tmp_path
):
    programs("sbatch", f'#!/bin/sh\ncat "$1" > {tmp_path}/given\nexit 7\n')
    words = ("recipe.yaml", "--on", "slurm", "--nodes", 2, "--set", "partition=gpu")
    document = ok(*words, "--dry-run")
    assert not (tmp_path / "given").exists()
    done = run(*words)
    assert done.exit_code == 7
    assert (tmp_path / "given").read_text() == document
    assert "slurm: 2 nodes without GPUs, 2 ranks" in done.stderr
    assert f"all nodes must see {project.run} on one disk" in done.stderr
    stored = run(*words, "train.output_dir=s3://bucket/run", "--dry-run")
    assert (stored.exit_code, "one disk" in stored.stderr) == (0, False)


def test_a_program_that_is_not_there_is_named(project, monkeypatch):
    monkeypatch.setenv("PATH", "")
    said = refused("recipe.yaml", "--on", "slurm")
    assert "sbatch: no such program on this machine" in said
    assert "--dry-run" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.max_step=3"], "did you mean max_steps?"),
        (["--nodes", 3], "train.global_batch_size (4) is not a multiple"),
        (["--gpus", 8], "ranks (2 x 8 = 16); set train.global_batch_size=16"),
        (["parallel.dp_shard=3"], "but there is 1 process; change --nodes or --gpus"),
        (["parallel.num_processes=2", "--gpus", 4], "leave it unset"),
        (["model.path=missing"], "missing"),
        (["data.datasets=[missing]"], "dataset 'missing'"),
        (["--nodes", "1:2"], "--nodes: expected a whole number from 1, got '1:2'"),
        (["--nodes", "0"], "expected a whole number from 1"),
        (["--set", "nodes=2"], "use --nodes and --gpus"),
    ],
)
def test_nothing_is_submitted_that_would_fail_at_once(project, programs, tmp_path, words, said):
    programs("sbatch", f"#!/bin/sh\ntouch {tmp_path}/submitted\n")
    assert said in refused("recipe.yaml", *words, "--on", "slurm")
    assert not (tmp_path / "submitted").exists()


def test_a_recipe_that_is_not_there_is_named(project):
    assert "no such file" in refused("recipes.yaml", "--on", "slurm", "--dry-run")


def test_sizes_that_would_change_the_batch_are_refused(project):
    project.sections["train"].pop("global_batch_size")
    project.write()
    recipe = load(project.recipe)
    usual = {"recipe": project.recipe, "name": "first", "output_dir": "run"}
    check_ranks(recipe, LaunchRequest(**usual, min_nodes=1, nodes=2))  # 16 divides by both
    with pytest.raises(RecipeError, match="it would be 16 with 2 ranks, 18 with 3 ranks"):
        check_ranks(recipe, LaunchRequest(**usual, min_nodes=2, nodes=3))


def test_ranks_of_a_node_without_gpus_are_those_of_the_recipe(project):
    done = run("recipe.yaml", "parallel.num_processes=2", "--on", "slurm", "--dry-run")
    assert "#SBATCH --ntasks-per-node=2" in done.stdout
    assert "1 node without GPUs, 2 ranks" in done.stderr


def test_a_preempted_job_is_started_again_until_it_is_complete(project, programs, slurm, tmp_path):
    script = (
        "#!/bin/sh\nif [ -e {0} ]; then exit 0; fi\n[ $SLURM_PROCID = 1 ] && touch {0}\nexit {1}\n"
    )
    programs("surefoot", script.format(tmp_path / "stopped", 128 + signal.SIGTERM))
    assert run("recipe.yaml", "--on", "slurm", "--nodes", 2).exit_code == 0
    assert slurm() == [143, 0]


@pytest.mark.parametrize("code", [1, 2, 3, 128 + signal.SIGINT])  # the last: surefoot stop
def test_a_job_that_has_failed_is_not_started_again(project, programs, slurm, code):
    programs("surefoot", f"#!/bin/sh\nexit {code}\n")
    assert run("recipe.yaml", "--on", "slurm").exit_code == code
    assert slurm() == [code]


def test_a_job_that_is_killed_each_time_is_not_started_for_ever(project, programs, slurm):
    programs("surefoot", "#!/bin/sh\nexit 137\n")
    done = run("recipe.yaml", "--on", "slurm", "--set", "restarts=3")
    assert done.exit_code == 137
    assert slurm() == [137] * 4


@pytest.mark.proof
def test_a_preempted_job_of_two_ranks_resumes_to_the_same_bits(
    project, programs, slurm, tmp_path, monkeypatch
):
    """About 60 s: three times two ranks."""
    programs("surefoot", f'#!/bin/sh\nexec {sys.executable} -P -m surefoot "$@"\n')
    whole = str(tmp_path / "whole")
    words = ("recipe.yaml", "--on", "slurm", "--nodes", 2)
    assert run(words[0], f"train.output_dir={whole}", *words[1:]).exit_code == 0
    monkeypatch.setenv("FAKE_PREEMPT", str(project.run / "checkpoint-6"))
    assert run(*words).exit_code == 0
    assert slurm() == [0, 143, 0]
    events = [json.loads(e) for e in (project.run / "launches.jsonl").read_text().splitlines()]
    launches = [event for event in events if event["event"] == "launch"]
    assert [launch["ranks"] for launch in launches] == [2, 2]
    assert launches[1]["resumed_from"] is not None
    assert losses(project.run) == losses(Path(whole))
    assert_same(final_weights(project.run), final_weights(Path(whole)))


def test_ray_that_is_not_installed_is_named(project, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "surefoot.plugins.launch.on_ray", raising=False)
    assert "pip install -e '.[ray]'" in refused("recipe.yaml", "--on", "ray", "--dry-run")


def page_commands():
    text = (Path(__file__).parents[3] / "docs/how-to/launch.md").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("surefoot launch ")]
    return [re.split(r" [>|] ", line)[0] for line in lines]


@pytest.mark.parametrize("line", page_commands())
def test_a_command_of_the_page_is_accepted(project, on_ray, line):
    """With Ray's modules replaced; SkyPilot's and Kubernetes' paths are relative to the project."""
    project.sections["train"] |= {"output_dir": "runs/first", "global_batch_size": 32}
    project.sections["train"]["micro_batch_size"] = 1
    project.write()
    words = shlex.split(line)[2:]
    assert ok(*words, *(["--dry-run"] if "--dry-run" not in words else []))
