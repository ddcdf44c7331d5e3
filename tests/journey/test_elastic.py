"""Under torchrun: what dies is started again, with fewer processes where a machine stays away.

Two agents on one machine stand for two machines. The first one holds what they meet in.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from project import Project, checkpoints, losses, surefoot

CLOSE = 2e-5  # of losses after some steps of Adam: sums in another order
OPTIM = {"adamw": {"learning_rate": 0.003, "schedule": "constant"}}  # runs here change their length
STEPS = 40  # that are compared
pytestmark = pytest.mark.proof


class Agents:
    """Torchrun's agents of one run, each with its log."""

    def __init__(self, project, *options):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.project, self.options, self.all = project, options, []

    def start(self, *overrides):
        command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "run"]
        command += [*self.options, "-m", "surefoot", "train", str(self.project.recipe), *overrides]
        # else a machine that comes later does not find the others (torch 2.13)
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self.project.folder / f"agent-{len(self.all)}").open("w") as log:
            agent = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.all.append(agent)
        return agent

    def told(self, number=0):
        return (self.project.folder / f"agent-{number}").read_text()

    def wait_for(self, happened, seconds=120):
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline, self.told()
            assert self.all[0].poll() is None, self.told()
            time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for agent in self.all:
            if agent.poll() is None:
                kill(agent)


def workers(agent):
    with open(f"/proc/{agent.pid}/task/{agent.pid}/children") as file:  # noqa: PTH123
        return [int(word) for word in file.read().split()]


def kill(agent):
    """As if its machine had lost power."""
    for pid in [*workers(agent), agent.pid]:
        os.kill(pid, signal.SIGKILL)
    agent.wait()


def last_step(project):
    return max(losses(project.run), default=0) if (project.run / "metrics.jsonl").exists() else 0


def num_ranks(project):
    """How many ranks wrote the newest checkpoint."""
    return json.loads((checkpoints(project.run)[-1] / "manifest.json").read_text())["world_size"]


def assert_is_one_run(project, folder):
    """Its losses are those of a run of one process that nothing happened to."""
    alone = Project(folder, optim=OPTIM, train={"max_steps": STEPS})
    code, _, err = surefoot("train", alone.recipe)
    assert code == 0, err
    found = losses(project.run)
    for step, loss in losses(alone.run).items():
        assert found[step] == pytest.approx(loss, abs=CLOSE * step), step


def test_a_run_goes_on_on_the_machine_that_is_left_and_takes_the_other_one_back(tmp_path):
    project = Project(
        tmp_path / "p", optim=OPTIM, train={"max_steps": 10**6}, checkpoint={"save_steps": 4}
    )
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"]
    with Agents(project, *options, "--rdzv-conf", "last_call_timeout=10") as agents:
        first = agents.start()
        time.sleep(2)  # it is the first to come
        second = agents.start()
        agents.wait_for(lambda: last_step(project) >= 10)
        kill(second)
        before = last_step(project)
        agents.wait_for(lambda: last_step(project) > max(before, STEPS))
        assert "lost the connection to another rank" in agents.told()
        assert "Traceback" not in agents.told()
        assert num_ranks(project) == 1
        third = agents.start()
        agents.wait_for(lambda: num_ranks(project) == 2)
        for agent in (first, third):
            agent.send_signal(signal.SIGTERM)
        for agent in (first, third):
            agent.wait(timeout=60)
    assert checkpoints(project.run)[-1].name == f"checkpoint-{last_step(project)}"
    assert_is_one_run(project, tmp_path / "alone")


def test_axes_that_no_longer_fit_are_said(tmp_path):
    project = Project(tmp_path / "p", train={"max_steps": 10**6}, checkpoint={"save_steps": 4})
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "1"]
    with Agents(project, *options, "--rdzv-conf", "last_call_timeout=10") as agents:
        first = agents.start("parallel.dp_shard=2")
        time.sleep(2)
        second = agents.start("parallel.dp_shard=2")
        agents.wait_for(lambda: last_step(project) >= 5)
        kill(second)
        assert first.wait(timeout=120) == 1
    told = agents.told()
    assert "is 1 x 1 x 2 x 1, but there is 1 process; start as many, " in told
    assert "or leave dp_shard unset" in told


def test_a_dead_rank_is_started_again_within_seconds(tmp_path):
    project = Project(
        tmp_path / "p", optim=OPTIM, train={"max_steps": STEPS}, checkpoint={"save_steps": 4}
    )
    with Agents(project, "--nproc-per-node", "2", "--max-restarts", "1") as agents:
        first = agents.start()
        agents.wait_for(lambda: checkpoints(project.run))
        os.kill(workers(first)[1], signal.SIGKILL)
        assert first.wait(timeout=120) == 0, agents.told()
    assert "resuming from checkpoint-" in agents.told()
    assert "lost the connection to another rank" not in agents.told(), "an echo must not be heard"
    assert_is_one_run(project, tmp_path / "alone")


def test_a_mistake_is_said_once(tmp_path):
    project = Project(tmp_path / "p", data={"datasets": ["nothing"]})
    with Agents(project, "--nproc-per-node", "2") as agents:
        assert agents.start().wait(timeout=120) == 1
    ours, _, torchrun = agents.told().partition("exitcode: 2")
    assert ours.count("error:") == 1
    assert "Traceback" not in ours
    assert torchrun, "torchrun says which one it was"
