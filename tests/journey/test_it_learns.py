"""Every stage learns what its example is for, on data that it was not trained on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "learning.py"


@pytest.fixture(scope="module")
def report():
    done = subprocess.run([sys.executable, BENCHMARK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("stage", "before", "after"),
    [
        ("sft", (5, None), (None, 0.1)),
        ("rm", (None, 0.6), (0.98, None)),  # pairs that are right
        ("dpo", (None, 0.1), (5, None)),  # margin
        ("grpo", (None, 0.9), (0.9, None)),  # reward
        ("ppo", (None, 0.3), (0.9, None)),
        ("distill", (1, None), (None, 0.1)),  # nats from the teacher
    ],
)
def test_the_example_of_a_stage_learns(stage, before, after, report):
    for value, (least, most) in (
        (report[stage]["before"], before),
        (report[stage]["after"], after),
    ):
        assert least is None or value >= least
        assert most is None or value <= most
