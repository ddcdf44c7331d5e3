"""Of several processes any one may be killed, again and again: the same command goes on."""

import json
import os
import sys
from pathlib import Path

import pytest

import warm

HERE = Path(__file__).parent
KILLS = int(os.environ.get("SUREFOOT_KILLS", "200"))
CLOSE = 1e-4  # of losses after 30 steps of Adam whose sums were taken in changing orders


def killed(kills, counts, folder, seed=0):
    """What gang.py tells of its last run."""
    places = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, HERE / "gang.py", kills, seed, counts, folder]
    done = warm.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    print(done.stdout)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.proof
def test_a_run_of_two_that_is_killed_at_random_ends_in_the_same_bits(tmp_path):
    told = killed(4, "2", tmp_path)
    assert sum(told["kills"].values()) == 4
    assert told["worst"] == [0.0, 0.0]


@pytest.mark.proof
def test_a_run_of_two_that_is_killed_at_random_hundreds_of_times(tmp_path):
    told = killed(KILLS, "2", tmp_path, seed=1)
    assert sum(told["kills"].values()) == KILLS
    assert told["worst"] == [0.0, 0.0]


@pytest.mark.proof
def test_as_many_go_on_as_there_are(tmp_path):
    told = killed(max(4, KILLS // 10), "1,2,4", tmp_path, seed=2)
    assert told["worst"][0] < CLOSE
