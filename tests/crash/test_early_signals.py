"""A signal in the first seconds of a start: the process ends by it, says no traceback, leaves
nothing half made, and the same command trains as if nothing had been."""

import random
import shutil
import signal
import subprocess
import time
from itertools import product

import pytest

import surefoot
import warm
from each import some
from project import Project, assert_same, checkpoints, final_weights, start
from surefoot.checkpoint.verification import verify


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    made = Project(tmp_path_factory.mktemp("early"), train={"max_steps": 3})
    surefoot.train(made.recipe, train={"output_dir": str(made.folder / "whole")})
    return made


def ended(project, number, seconds, popen):
    """Exit code of a run that gets a signal so long after its start."""
    process = start("train", project.recipe, popen=popen)
    time.sleep(seconds)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert "Traceback" not in err, (seconds, err)
    return process.returncode, err


def goes_on(project):
    """What the next start makes of it."""
    assert not [path for path in checkpoints(project.run) if not verify(path).ok]
    surefoot.train(project.recipe)
    assert_same(final_weights(project.run), final_weights(project.folder / "whole"))
    shutil.rmtree(project.run)


def expected(number):
    """By the signal, or after a save for it, or too late for it."""
    return {-number, 128 + number, 0}


@pytest.mark.parametrize(
    ("seconds", "number"),
    some(
        [*product((0.05, 0.5), (signal.SIGTERM, signal.SIGHUP))],
        [(0.05, signal.SIGHUP), (0.5, signal.SIGTERM)],
    ),
)
def test_a_start_that_is_broken_off_is_as_none(number, seconds, project):
    code, err = ended(project, number, seconds, warm.Popen)
    assert code in expected(number), (code, err)
    goes_on(project)


@pytest.mark.proof
def test_a_signal_at_any_moment_of_a_real_start(project):
    """From the first import of ours on: before that, Python says what it is interrupted in."""
    random_numbers, codes = random.Random(0), set()
    for _ in range(40):
        number = random_numbers.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
        code, err = ended(project, number, random_numbers.uniform(0.4, 9), subprocess.Popen)
        assert code in expected(number), (code, err)
        codes.add(code)
        goes_on(project)
    assert len(codes) > 2
