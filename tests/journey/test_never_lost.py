"""No step is ever lost: killed at any moment, the same command ends in the same bits."""

import random
import signal
import time

import pytest

import surefoot
from project import Project, assert_same, checkpoints, final_weights, in_child, losses, start
from surefoot.checkpoint.verify import verify

CASES = {
    "full": {"method": "full"},
    "freeze": {"method": {"freeze": {"num_layers": 1}}},
    "lora": {"method": {"lora": {"rank": 2, "dropout": 0.2}}},
    "pt": {"stage": "pt", "method": "full"},
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


@pytest.mark.parametrize("case", CASES)
def test_killed_again_and_again_a_run_ends_in_the_same_bits(case, tmp_path):
    """Kills at random moments of start-up, steps and saves; every start is the same command."""
    reference = whole(tmp_path / "whole", **CASES[case])
    project = Project(tmp_path / "killed", **CASES[case])
    moments = random.Random(case)
    kills = 0
    for _ in range(40):
        code = in_child(
            lambda: surefoot.train(project.recipe), kill_after=moments.uniform(0.2, 1.6)
        )
        if code == 0:
            break
        assert code == -signal.SIGKILL
        kills += 1
    else:
        assert in_child(lambda: surefoot.train(project.recipe)) == 0
    assert kills
    assert_no_worse_for_it(project, reference)


def test_the_command_line_goes_on_after_kill_9_and_after_sigterm(tmp_path):
    reference = whole(tmp_path / "whole", train={"max_steps": 40})
    project = Project(tmp_path / "cut", train={"max_steps": 40})
    for number, code in ((signal.SIGKILL, -9), (signal.SIGTERM, 128 + 15)):
        process = start("train", project.recipe)
        before = len(losses(project.run)) if project.run.exists() else 0
        while process.poll() is None and _logged(project) < before + 8:
            time.sleep(0.02)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == code, err
    assert "the same command goes on from here" in err
    process = start("train", project.recipe)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "going on from checkpoint-" in err
    assert_no_worse_for_it(project, reference)


def _logged(project):
    path = project.run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_damaged_newest_checkpoint_is_passed_over_and_kept(tmp_path):
    reference = whole(tmp_path / "whole")
    project = whole(tmp_path / "damaged")
    weights = checkpoints(project.run)[-1] / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    assert in_child(lambda: surefoot.train(project.recipe)) == 0
    assert (project.run / "checkpoint-12.damaged" / "model.safetensors").read_bytes() == bytes(data)
    assert_no_worse_for_it(project, reference)


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(60))
def test_proof_of_many_kills(seed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills")
    case = list(CASES)[seed % len(CASES)]
    reference = whole(folder / "whole", **CASES[case])
    project = Project(folder / "killed", **CASES[case])
    moments = random.Random(seed)
    longest = 1.2
    while in_child(
        lambda: surefoot.train(project.recipe), kill_after=moments.uniform(0.3, longest)
    ):
        longest += 0.1  # so that a loaded machine gets there too
    assert_no_worse_for_it(project, reference)
