"""kill -9 at random moments: the run always goes on, and ends as if nothing had happened."""

import random
import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from trainer_run import train
from transformers import TrainerCallback

from project import in_child
from surefoot.checkpoint import recover_latest
from surefoot.checkpoint.disk.commit import committed, step_of

STEPS = 50


class Count(TrainerCallback):
    """Writes every step to a file, a byte each."""

    def __init__(self, path):
        self.path = path

    def on_step_end(self, args, state, control, **kwargs):
        with self.path.open("ab") as file:
            file.write(bytes([state.global_step]))
        time.sleep(0.01)


def killed_after(count, steps, delay):
    """Whether this many steps, and then so many seconds, have passed."""
    told = []

    def kill_when():
        if not told and count.exists() and count.stat().st_size >= steps:
            told.append(time.monotonic())
        return told and time.monotonic() > told[0] + delay

    return kill_when


@pytest.mark.parametrize("kills", [3, pytest.param(6, marks=pytest.mark.proof)])
def test_a_run_killed_again_and_again_ends_with_the_same_weights(kills, tmp_path):
    def run(name, count=tmp_path / "count"):
        train(tmp_path / name, max_steps=STEPS, keep=2, callbacks=[Count(count)])

    run("whole", tmp_path / "whole.count")
    rng, reached = random.Random(0), 0
    for kill in range(kills):
        count = tmp_path / f"{kill}.count"
        when = killed_after(count, rng.randint(1, 9), rng.random() / 10)
        code = in_child(lambda c=count: run("run", c), kill_when=when)
        assert code == -signal.SIGKILL
        done = list(count.read_bytes())
        assert done == list(range(done[0], done[-1] + 1))
        assert done[0] <= reached + 1
        found = recover_latest(tmp_path / "run")
        assert found is None or step_of(found) <= done[-1]
        reached = step_of(found) if found else 0
    assert reached > 0
    assert in_child(lambda: run("run")) == 0
    assert (tmp_path / "count").read_bytes() == bytes(range(reached + 1, STEPS + 1))
    ends = [committed(tmp_path / name)[-1] for name in ("whole", "run")]
    assert [end.name for end in ends] == [f"checkpoint-{STEPS}"] * 2
    for name in ("model.safetensors", "optimizer.safetensors"):
        one, other = (load_file(end / name) for end in ends)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one), name
