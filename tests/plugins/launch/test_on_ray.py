"""Runs on a Ray cluster of two nodes on this machine: what is lost when a node is, and at Ctrl-C.

Each start of Ray is most of a minute on two cores, so these are proofs.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from project import assert_same, checkpoints, final_weights, losses, metrics

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore")]
EXAMPLES = Path(__file__).parents[3] / "examples"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps all of it on 127.0.0.1
    "RAY_AUTH_MODE": "disabled",  # else a token is written to the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
}
WORDS = ["quickstart.yaml", "train.micro_batch_size=8", "train.max_steps=24", "train.log_steps=1"]
WORDS += ["checkpoint.save_steps=2", "checkpoint.keep=null"]
SECONDS = 300


def surefoot(log, *words):
    command = [sys.executable, "-P", "-m", "surefoot", *map(str, words)]
    options = {"stdout": log, "stderr": log, "cwd": EXAMPLES}
    return subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, **options)


@pytest.fixture(scope="module", autouse=True)
def cluster_utils():
    for name, value in ENVIRONMENT.items():
        os.environ[name] = value  # before Ray is imported
    return pytest.importorskip("ray.cluster_utils", reason="needs pip install 'surefoot[ray]'")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same run without Ray, never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    with (folder / "log").open("w") as log:
        place = f"train.output_dir={folder}/run"
        train = surefoot(log, "train", *WORDS, place, "parallel.num_processes=2")
        assert train.wait(SECONDS) == 0, (folder / "log").read_text()
    return folder / "run"


class Launch:
    """A run on a cluster of two nodes with one core each."""

    def __init__(self, cluster_utils, folder):
        self.folder, self.run, self.log = folder, folder / "run", folder / "log"
        head = {"num_cpus": 1, "node_ip_address": "127.0.0.1"}
        self.cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        self.node = self.add_node()

    def add_node(self):
        return self.cluster.add_node(num_cpus=1, node_ip_address="127.0.0.1")

    def start(self, *words):
        address = ("--set", f"address={self.cluster.address}")
        place = f"train.output_dir={self.run}"
        with self.log.open("w") as log:
            words = ("launch", *WORDS, place, "--on", "ray", "--nodes", "2", *address, *words)
            self.driver = surefoot(log, *words)
        return self

    def reach(self, step):
        self.wait_for((self.run / f"checkpoint-{step}").exists)

    def wait_for(self, condition):
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert self.driver.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def wait(self, code=0):
        assert self.driver.wait(SECONDS) == code, self.log.read_text()
        return self.log.read_text()

    def launches(self):
        lines = (self.run / "launches.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] != "log"]


@pytest.fixture
def launch(cluster_utils, tmp_path):
    launch = Launch(cluster_utils, tmp_path)
    yield launch
    launch.driver.kill()
    launch.driver.wait()
    launch.cluster.shutdown()


def test_a_node_that_is_lost_in_mid_step_costs_no_bit(launch, whole):
    launch.start().reach(6)
    launch.cluster.remove_node(launch.node, allow_graceful=False)
    launch.add_node()
    launch.wait()
    starts = [event for event in launch.launches() if event["event"] == "launch"]
    assert [start["ranks"] for start in starts] == [2, 2]
    assert starts[1]["resumed_from"].startswith("checkpoint-")
    assert losses(launch.run) == losses(whole)
    assert_same(final_weights(launch.run), final_weights(whole))


def test_a_notice_that_a_node_is_about_to_be_taken_away_is_a_checkpoint(launch):
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    launch.start("checkpoint.save_steps=1000", "train.max_steps=1000")
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
    launch.start().reach(4)
    launch.driver.send_signal(number)
    log = launch.wait(128 + number)
    assert "saved; run the same command to resume" in log
    end = launch.launches()[-1]
    assert (end["event"], end["outcome"]) == ("end", "stopped")
    assert (launch.run / f"checkpoint-{end['step']}").exists()
    if number == signal.SIGINT:
        launch.start().wait()
        assert launch.launches()[2]["resumed_from"] == f"checkpoint-{end['step']}"
        assert losses(launch.run) == losses(whole)


def test_an_error_that_only_the_user_can_fix_is_not_tried_again(launch, whole):
    launch.run.mkdir()
    (launch.run / "checkpoint-3").mkdir()  # of nobody
    (launch.run / "checkpoint-3" / "manifest.json").write_text("{}")
    log = launch.start().wait(2)
    assert "error: " in log
    assert log.count("Started training worker group") == 1
    assert "Traceback" not in log


def test_a_run_continues_on_the_node_that_is_left(launch, whole, monkeypatch):
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "15")
    launch.start("--nodes", "1:2").reach(6)
    launch.cluster.remove_node(launch.node, allow_graceful=False)
    launch.wait()
    starts = [event["ranks"] for event in launch.launches() if event["event"] == "launch"]
    assert starts == [2, 1]
    ours, theirs = losses(launch.run), losses(whole)
    assert ours.keys() == theirs.keys()
    assert max(abs(ours[step] - theirs[step]) for step in ours) < 1e-4  # of losses of 1 to 9
