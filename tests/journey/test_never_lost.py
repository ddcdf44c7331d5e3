"""No step is ever lost: killed at any moment, the same command ends in the same bits."""

import random
import shutil
import signal
import subprocess
import time

import pytest
from transformers import AutoModelForCausalLM

import surefoot
import warm
from adapted import FITTING, SMALL
from damage import flip
from project import Project, assert_same, checkpoints, final_weights, in_child, losses, start
from project import surefoot as command
from surefoot.checkpoint.verification import verify

CASES = {
    "full": {"method": "full"},
    "lora": {"method": {"lora": {"rank": 2, "dropout": 0.2}}},
}
PROVEN = CASES | {
    "freeze": {"method": {"freeze": {"num_layers": 1}}},
    "pt": {"stage": "pt", "method": "full"},
    "padded": {"method": "full", "data": {"packing": False}},
    "pissa": {"method": {"lora": {"rank": 2, "init": "pissa"}}},
    "waited for": {"method": "full", "checkpoint": {"async_save": False}},
    "dpo": {"method": {"lora": {"rank": 2}}, "stage": {"dpo": {}}, "data": {"datasets": ["pairs"]}},
    "rm": {"method": "full", "stage": "rm", "data": {"datasets": ["pairs"]}},
    "kto": {"method": "full", "stage": {"kto": {}}, "data": {"datasets": ["marked"]}},
}


def whole(folder, **sections):
    project = Project(folder, **sections)
    assert in_child(lambda: surefoot.train(project.recipe)) == 0
    return project


def assert_no_worse_for_it(project, reference):
    assert losses(project.run) == losses(reference.run)
    assert_same(final_weights(project.run), final_weights(reference.run))
    newest = checkpoints(project.run)[-1]
    assert verify(newest, full=True).ok
    assert not list(project.run.glob(".checkpoint*"))


def num_logged(project):
    path = project.run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def moment(project, moments):
    """When to kill next: some new steps on, or in the middle of a save, and a little later."""
    lines = num_logged(project) + moments.randint(1, 4)
    in_a_save = moments.random() < 0.5

    def reached():
        saving = in_a_save and any(project.run.glob(".checkpoint-*.part"))
        if not saving and num_logged(project) < lines:
            return False
        time.sleep(moments.uniform(0, 0.03))
        return True

    return reached


def killed_again_and_again(project, moments):
    """Start the same command until it comes to its end; how often it was killed."""
    kills = 0
    while code := in_child(
        lambda: surefoot.train(project.recipe), kill_when=moment(project, moments)
    ):
        assert code == -signal.SIGKILL
        kills += 1
    return kills


@pytest.mark.parametrize("case", [pytest.param("full", marks=pytest.mark.proof), "lora"])
def test_killed_again_and_again_a_run_ends_in_the_same_bits(case, tmp_path):
    """Kills between steps, within them and in the middle of saves; every start is the same."""
    reference = whole(tmp_path / "whole", **CASES[case])
    project = Project(tmp_path / "killed", **CASES[case])
    assert killed_again_and_again(project, random.Random(case)) >= 2
    assert_no_worse_for_it(project, reference)


def test_the_command_line_goes_on_after_kill_9_and_after_sigterm(tmp_path):
    reference = whole(tmp_path / "whole", train={"max_steps": 40})
    project = Project(tmp_path / "cut", train={"max_steps": 40})
    cold = subprocess.Popen  # a user's own start, imports and all
    for number, code, popen in ((signal.SIGKILL, -9, cold), (signal.SIGTERM, 128 + 15, warm.Popen)):
        process = start("train", project.recipe, popen=popen)
        before = len(losses(project.run)) if project.run.exists() else 0
        while process.poll() is None and num_logged(project) < before + 8:
            time.sleep(0.02)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == code, err
    assert "saved; run the same command to resume" in err
    code, _, err = command("train", project.recipe)
    assert code == 0, err
    assert "resuming from checkpoint-" in err
    assert_no_worse_for_it(project, reference)


def test_a_damaged_newest_checkpoint_is_passed_over_and_kept(tmp_path):
    reference = whole(tmp_path / "whole")
    project = whole(tmp_path / "damaged")
    weights = checkpoints(project.run)[-1] / "model.safetensors"
    flip(weights, weights.stat().st_size // 2)
    data = weights.read_bytes()
    assert in_child(lambda: surefoot.train(project.recipe)) == 0
    assert (project.run / "checkpoint-12.damaged" / "model.safetensors").read_bytes() == data
    assert_no_worse_for_it(project, reference)


@pytest.mark.proof
def test_frozen_weights_lie_on_the_disk_twice_and_every_checkpoint_opens_alone(tmp_path):
    project = whole(tmp_path, method={"freeze": {"num_layers": 1}}, train={"max_steps": 9})
    found = checkpoints(project.run)
    frozen = [folder / "model-00001-of-00002.safetensors" for folder in found]
    # no damage to one file can take all checkpoints
    assert len({path.stat().st_ino for path in frozen}) == 2 or frozen[0].stat().st_nlink == 1
    weights = final_weights(project.run)
    for folder in found[:-1]:
        shutil.rmtree(folder)
    opened = AutoModelForCausalLM.from_pretrained(found[-1])
    assert_same(weights, {name: opened.state_dict()[name] for name in weights})


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(60))
def test_proof_of_many_kills(seed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills")
    case = list(PROVEN)[seed % len(PROVEN)]
    reference = whole(folder / "whole", **PROVEN[case])
    project = Project(folder / "killed", **PROVEN[case])
    assert killed_again_and_again(project, random.Random(seed))
    assert_no_worse_for_it(project, reference)


SETTINGS = {"apollo": {"rank": 4, "update_gap": 3}, "galore": {"rank": 4, "update_gap": 3}}


@pytest.mark.proof
@pytest.mark.parametrize(
    ("optim", "method"), [(optim, method) for optim, fit in FITTING.items() for method in fit]
)
def test_proof_of_kills_of_every_optimizer_and_method(optim, method, tmp_path):
    def made(folder):
        project = Project(folder, method={method: SMALL.get(method, {})})
        settings = {"learning_rate": 1e-3, **SETTINGS.get(optim, {})}
        project.sections["optim"] = {optim: settings}
        project.write()
        return project

    reference, project = made(tmp_path / "whole"), made(tmp_path / "killed")
    assert in_child(lambda: surefoot.train(reference.recipe)) == 0
    assert killed_again_and_again(project, random.Random(f"{optim} {method}"))
    assert_no_worse_for_it(project, reference)
