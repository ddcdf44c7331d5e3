"""Runs on a Ray cluster of two nodes on this machine: what is lost when a node is, and at Ctrl-C.

Each start of Ray is most of a minute on two cores, so these are proofs.
"""

import json
import signal
import time
from pathlib import Path

import pytest

from project import assert_same, checkpoints, final_weights, losses, metrics
from ray_cluster import SECONDS, TwoNodes, surefoot

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore")]
EXAMPLES = Path(__file__).parents[3] / "examples"
WORDS = ["quickstart.yaml", "train.micro_batch_size=8", "train.max_steps=24", "train.log_steps=1"]
WORDS += ["checkpoint.save_steps=2", "checkpoint.keep=null"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same run without Ray, never stopped."""
    return alone(tmp_path_factory.mktemp("whole"))


def alone(folder, *words, ranks=2):
    """A run without Ray."""
    with (folder / "alone.log").open("w") as log:
        place = f"train.output_dir={folder}/alone"
        words = ("train", *WORDS, *words, place, f"parallel.num_processes={ranks}")
        train = surefoot(log, *words, cwd=EXAMPLES)
        assert train.wait(SECONDS) == 0, (folder / "alone.log").read_text()
    return folder / "alone"


class Launch(TwoNodes):
    """A run on both nodes."""

    def __init__(self, folder):
        self.folder, self.run = folder, folder / "run"
        super().__init__(folder / "log")

    def launch(self, *words, env=None):
        address = ("--set", f"address={self.cluster.address}")
        place = f"train.output_dir={self.run}"
        words = ("launch", *WORDS, place, "--on", "ray", "--nodes", "2", *address, *words)
        self.start(*words, cwd=EXAMPLES, env=env or {})
        return self

    def reach(self, step):
        self.wait_for((self.run / f"checkpoint-{step}").exists)

    def launches(self):
        lines = (self.run / "launches.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] != "log"]

    def starts(self):
        return [event for event in self.launches() if event["event"] == "launch"]

    def ranks(self):
        return [start["ranks"] for start in self.starts()]


@pytest.fixture
def launch(tmp_path):
    launch = Launch(tmp_path)
    yield launch
    launch.shutdown()


def test_a_node_that_is_lost_in_mid_step_costs_no_bit(launch, whole):
    launch.launch().reach(6)
    launch.lose_node()
    launch.add_node()
    launch.wait()
    assert launch.ranks() == [2, 2]
    assert launch.starts()[1]["resumed_from"].startswith("checkpoint-")
    assert losses(launch.run) == losses(whole)
    assert_same(final_weights(launch.run), final_weights(whole))


def test_a_notice_that_a_node_is_about_to_be_taken_away_is_a_checkpoint(launch):
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    launch.launch("checkpoint.save_steps=1000", "train.max_steps=1000")
    launch.wait_for(lambda: (launch.run / "metrics.jsonl").exists() and metrics(launch.run))
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    until = int((time.time() + 120) * 1000)
    gcs = GcsClient(address=launch.cluster.address)
    gcs.drain_node(launch.node.node_id, reason, "spot", until)
    launch.wait_for(lambda: checkpoints(launch.run))
    assert "a node is about to be taken away: saving" in launch.log.read_text()
    assert time.time() * 1000 < until - 30_000, "half a minute before the node is gone"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_driver_saves_and_the_same_command_resumes(launch, whole, number):
    launch.launch().reach(4)
    launch.driver.send_signal(number)
    log = launch.wait(128 + number)
    assert "saved; run the same command to resume" in log
    end = launch.launches()[-1]
    assert (end["event"], end["outcome"]) == ("end", "stopped")
    assert (launch.run / f"checkpoint-{end['step']}").exists()
    if number == signal.SIGINT:
        launch.launch().wait()
        assert launch.launches()[2]["resumed_from"] == f"checkpoint-{end['step']}"
        assert losses(launch.run) == losses(whole)


def test_an_error_that_only_the_user_can_fix_is_not_tried_again(launch, whole):
    launch.run.mkdir()
    (launch.run / "checkpoint-3").mkdir()  # of nobody
    (launch.run / "checkpoint-3" / "manifest.json").write_text("{}")
    log = launch.launch().wait(2)
    assert "error: " in log
    assert log.count("Started training worker group") == 1
    assert "Traceback" not in log


def test_a_run_continues_on_the_node_that_is_left_and_on_both_when_it_is_back(launch, tmp_path):
    """Ray looks once a minute whether there is room for more workers, so the run is a long one. Its
    losses are those of a run without Ray that was given as many ranks at the same steps."""
    same = ("optim.adamw.schedule=constant", "optim.adamw.warmup_steps=2")
    same += ("checkpoint.save_steps=10",)
    env = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "15"}
    launch.launch(*same, "train.max_steps=2000", "--nodes", "1:2", env=env).reach(10)
    launch.lose_node()
    launch.wait_for(lambda: launch.ranks() == [2, 1])
    launch.add_node()
    launch.wait_for(lambda: launch.ranks() == [2, 1, 2])
    lost, grown = (int(s["resumed_from"].rpartition("-")[2]) for s in launch.starts()[1:])
    launch.reach(grown + 10)
    launch.driver.send_signal(signal.SIGTERM)
    launch.wait(128 + signal.SIGTERM)
    for ranks, step in ((2, lost), (1, grown), (2, grown + 10)):
        whole = alone(tmp_path, *same, f"train.max_steps={step}", ranks=ranks)
    ours, theirs = losses(launch.run), losses(whole)
    assert {step: ours[step] for step in theirs} == theirs
