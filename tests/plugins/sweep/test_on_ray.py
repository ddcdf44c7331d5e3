"""A sweep on a Ray cluster of two nodes on this machine: what is lost when a node is, and when the
sweep itself is killed.

A start of Ray is most of a minute on two cores, so this is a proof.
"""

import json
import signal
import time
from pathlib import Path

import pytest

from project import Project, assert_same, checkpoints, final_weights, losses
from ray_cluster import SECONDS, TwoNodes, surefoot
from surefoot.training.callbacks.launches import is_alive, last_heartbeat

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore")]
STEPS = 400


@pytest.fixture
def ray(tmp_path, request):
    nodes = TwoNodes(tmp_path / "log", **getattr(request, "param", {}))
    yield nodes
    nodes.shutdown()


def test_a_lost_node_and_a_killed_sweep_cost_no_trial_and_no_bit(ray, tmp_path):
    data, train = {"val_size": 4}, {"max_steps": STEPS, "eval_steps": 100}
    saves = {"save_steps": 20, "keep": 2}
    project = Project(tmp_path / "project", data=data, train=train, checkpoint=saves)
    words = ["sweep", project.recipe, "optim.adamw.learning_rate=1e-4,1e-3,3e-3"]
    words += ["--sampler", "grid", "--json"]
    with (tmp_path / "here.json").open("w") as out:
        here = surefoot(out, *words, "--output", tmp_path / "here")
    assert here.wait(SECONDS) == 0, (tmp_path / "here.json").read_text()

    on_ray = [*words, "--output", tmp_path / "there", "--on", "ray", "--jobs", "2"]
    address = {"RAY_ADDRESS": ray.cluster.address}
    ray.start(*on_ray, env=address)
    first, second, third = (tmp_path / f"there/trial-000{n}" for n in range(3))

    def num_resumed(run):
        lines = map(json.loads, (run / "launches.jsonl").read_text().splitlines())
        return sum(bool(line.get("resumed_from")) for line in lines)

    ray.wait_for(lambda: all(run.is_dir() and checkpoints(run) for run in (first, second)))
    ray.lose_node()
    ray.add_node()
    ray.wait_for(lambda: num_resumed(first) + num_resumed(second) > 0)
    assert ray.log.read_text().count(": lost (") == 1

    running = [run for run in (first, second, third) if is_alive(last_heartbeat(run))]
    assert running
    ray.driver.send_signal(signal.SIGKILL)
    ray.wait(-signal.SIGKILL)
    deadline = time.monotonic() + SECONDS
    while any(is_alive(last_heartbeat(run)) for run in running):
        assert time.monotonic() < deadline, "a trial outlives its sweep"
        time.sleep(0.1)

    ray.start(*on_ray, env=address)
    said = ray.wait()
    assert "resumed: " in said
    expected, found = (
        json.loads((tmp_path / name / "results.json").read_text()) for name in ("here", "there")
    )
    assert found == expected
    for number in range(3):
        alone, run = (tmp_path / place / f"trial-000{number}" for place in ("here", "there"))
        assert losses(run) == losses(alone)
        assert len(losses(run)) == STEPS
        assert_same(final_weights(run), final_weights(alone))


@pytest.mark.parametrize("ray", [{"num_gpus": 1}], indirect=True)  # Ray does not look for them
def test_a_signal_to_the_sweep_saves_its_trials_which_have_the_gpus_of_their_nodes(ray, tmp_path):
    train = {"max_steps": 5000}
    project = Project(tmp_path / "project", train=train, checkpoint={"save_steps": 5000})
    words = ["sweep", project.recipe, "optim.adamw.learning_rate=1e-4,1e-3,3e-3", "--on", "ray"]
    words += ["--sampler", "grid", "--jobs", "3", "--gpus", "1", "--output", tmp_path / "sweep"]
    visible = {"RAY_ADDRESS": ray.cluster.address, "CUDA_VISIBLE_DEVICES": "7"}
    ray.start(*words, env=visible)
    runs = [tmp_path / f"sweep/trial-000{n}" for n in range(3)]
    ray.wait_for(lambda: all((run / "metrics.jsonl").exists() for run in runs[:2]))
    for run in runs[:2]:
        environment = Path(f"/proc/{last_heartbeat(run)['pid']}/environ").read_bytes()
        assert b"CUDA_VISIBLE_DEVICES=0" in environment.split(b"\0")
    ray.wait_for(lambda: "waiting for 1 CPU and 1 GPU on one node" in ray.log.read_text())
    ray.driver.send_signal(signal.SIGTERM)
    assert "stopped by SIGTERM" in ray.wait(128 + signal.SIGTERM)
    for run in runs[:2]:
        end = json.loads((run / "launches.jsonl").read_text().splitlines()[-1])
        assert (end["event"], end["outcome"]) == ("end", "stopped")
        assert (run / f"checkpoint-{end['step']}").exists()
    assert not runs[2].exists()
