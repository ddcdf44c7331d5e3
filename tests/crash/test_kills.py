"""Killed at every call of the seam, and at any moment: the newest checkpoint is whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import scene

TESTS = Path(__file__).parent.parent
PLACES = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
ENVIRONMENT = {**os.environ, "PYTHONPATH": PLACES, "OMP_NUM_THREADS": "1"}


def run(module, *args):
    command = [sys.executable, "-m", module, *map(str, args)]
    done = subprocess.run(
        command, env=ENVIRONMENT, cwd=TESTS, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def start(scratch):
    root = scratch / "start"
    return root, scene.set_up(root)


def kill_at_calls(start, target, step):
    target.mkdir()
    calls = int(run("crash.killer", start[0], target, step))
    victims = [p for p in target.iterdir() if p.name != "count"]
    assert len(victims) == 3 * len(range(0, calls, step)) > 0
    for root in victims:
        scene.check(root, start[1])
        scene.go_on(root)
    return len(victims)


def test_killed_at_many_calls(start, scratch):
    kill_at_calls(start, scratch / "victims", step=17)


@pytest.mark.proof
def test_killed_before_within_and_after_every_call(start, scratch):
    assert kill_at_calls(start, scratch / "all-victims", step=1) > 300


@pytest.mark.parametrize("how", [pytest.param("direct", marks=pytest.mark.proof), "background"])
def test_killed_at_random_moments(scratch, how):
    assert int(run("crash.runner", scratch / f"few-{how}", 12, how)) > 0


@pytest.mark.proof
@pytest.mark.parametrize("how", ["direct", "background"])
def test_killed_at_random_moments_a_thousand_times(tmp_path, how):
    """On a real disk, whose flushes take time."""
    assert int(run("crash.runner", tmp_path / "many", 1000, how)) > 300
