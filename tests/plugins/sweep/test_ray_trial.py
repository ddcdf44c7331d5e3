"""A trial in an actor of Ray, with a module that stands for Ray's; its process is a real one."""

import signal
import socket
import sys
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from commands import refused
from project import Project
from surefoot.errors import RunError

MODULES = ("surefoot.plugins.sweep.on_ray", "surefoot.parallel.ray_cluster")
HANGS = "import time; time.sleep(60)"


class Cluster(ModuleType):
    """Two nodes, and actors in this process; ``losses`` are raised by their next calls."""

    def __init__(self):
        super().__init__("ray")
        self.is_free, self.losses, self.killed = True, [], []
        self.util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.7")

    def init(self, **_):
        raise ConnectionError("Could not find any running Ray instance.")

    def nodes(self):
        resources = [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 8.0}]
        return [{"Alive": True, "Resources": each} for each in resources]

    def remote(self, **_):
        return lambda kind: SimpleNamespace(remote=lambda *words: self.actor(kind(*words)))

    def actor(self, actor):
        return SimpleNamespace(poll=SimpleNamespace(remote=lambda signals: (actor, [*signals])))

    def wait(self, answers, timeout):
        return (answers if self.is_free else [], [])

    def get(self, answer):
        actor, signals = answer
        if self.losses:
            raise self.losses.pop(0)
        try:
            return actor.poll(signals)
        except RunError as error:
            raise self.exceptions.RayTaskError(error) from None

    def kill(self, actor):
        self.killed.append(actor)


@pytest.fixture
def cluster(monkeypatch):
    cluster, errors = Cluster(), ModuleType("ray.exceptions")
    errors.RayError = type("RayError", (Exception,), {})
    errors.ActorUnavailableError = type("ActorUnavailableError", (errors.RayError,), {})
    errors.RayTaskError = type(
        "RayTaskError", (errors.RayError,), {"cause": property(lambda self: self.args[0])}
    )
    cluster.exceptions = errors
    monkeypatch.setitem(sys.modules, "ray", cluster)
    monkeypatch.setitem(sys.modules, "ray.exceptions", errors)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    cluster.module = import_module("surefoot.plugins.sweep.on_ray")
    monkeypatch.setattr(cluster.module, "_LOOK", 0.0)
    yield cluster
    for name in MODULES:
        sys.modules.pop(name)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """What stands for ``surefoot``: a script, which is also the recipe that all nodes must see."""
    launches = import_module("surefoot.training.callbacks.launches")
    monkeypatch.setattr(launches, "PYTHON", (sys.executable, "-P"))
    path = tmp_path / "recipe.py"

    def write(text):
        path.write_text(text)
        return path

    return write


def trial_of(cluster, script, lines, gpus=1):
    resources = cluster.module.Resources(1, gpus)
    return cluster.module.RayTrial(
        resources, lines.append, script.parent / "trial-0007", [str(script)]
    )


def end_of(trial):
    deadline = time.monotonic() + 30
    while (code := trial.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return code


def test_a_trial_without_gpus_sees_none_and_its_actor_ends_with_it(cluster, program, tmp_path):
    script = program(
        "import os, pathlib, sys\n"
        "pathlib.Path('seen').write_text(os.environ['CUDA_VISIBLE_DEVICES'] + '.')\nsys.exit(3)"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("CUDA_VISIBLE_DEVICES", "5")
        assert end_of(trial_of(cluster, script, [], gpus=0)) == 3
        assert (tmp_path / "seen").read_text() == "."
        assert end_of(trial_of(cluster, script, [], gpus=1)) == 3
        assert (tmp_path / "seen").read_text() == "5."
    assert len(cluster.killed) == 2


def test_a_lost_trial_is_started_again(cluster, program):
    lines, error = [], cluster.exceptions.RayError("The actor died.\n  its node has died")
    unavailable = cluster.exceptions.ActorUnavailableError("for now")
    cluster.losses = [unavailable, error, error]
    assert end_of(trial_of(cluster, program("raise SystemExit(0)"), lines)) == 0
    again = "trial 7: lost (its node has died); it starts again once nobody has its folder"
    assert lines == [again, again]


def test_a_trial_that_is_lost_again_and_again_is_left_half_run(cluster, program):
    lines, error = [], cluster.exceptions.RayError("its node has died")
    cluster.losses = [error] * 3
    assert end_of(trial_of(cluster, program(HANGS), lines)) == 128 + signal.SIGTERM
    assert lines[-1] == "trial 7: lost 3 times at one step (its node has died)"


def test_a_lost_trial_that_takes_steps_is_started_as_often_as_needed(cluster, program):
    script, error = program(HANGS), cluster.exceptions.RayError("its node has died")
    trial = trial_of(cluster, script, [])
    trial.folder.mkdir()
    for step in range(5):
        (trial.folder / ".heartbeat.json").write_text(f'{{"step": {step}}}')
        cluster.losses = [error]
        while cluster.losses:
            assert trial.poll() is None
    trial.send_signal(signal.SIGTERM)
    assert trial.poll() == 128 + signal.SIGTERM


def test_a_signal_reaches_the_process_once_even_if_it_was_lost_on_the_way(cluster, program):
    trial = trial_of(cluster, program(HANGS), [])
    while not (trial.folder / "train.log").exists():
        assert trial.poll() is None
    cluster.losses = [cluster.exceptions.ActorUnavailableError("for now")]
    trial.send_signal(signal.SIGTERM)
    assert end_of(trial) == -signal.SIGTERM


def test_a_trial_that_waits_for_a_node_says_so_and_ends_at_once(cluster, program, monkeypatch):
    monkeypatch.setattr(cluster.module, "_QUICK", -1.0)
    cluster.is_free, lines = False, []
    trial = trial_of(cluster, program(HANGS), lines, gpus=2)
    for _ in range(3):
        assert trial.poll() is None
    assert lines == ["trial 7: waiting for 1 CPU and 2 GPUs on one node, in use now"]
    trial.send_signal(signal.SIGINT)
    assert trial.poll() == 128 + signal.SIGINT
    assert len(cluster.killed) == 1


def test_nobody_waits_for_ever_for_gpus_that_no_node_has(cluster, program, monkeypatch):
    monkeypatch.setattr(cluster.module, "_QUICK", -1.0)
    cluster.is_free, lines = False, []
    trial = trial_of(cluster, program(HANGS), lines, gpus=4)
    for _ in range(3):
        assert trial.poll() is None
    (line,) = lines
    assert "no node of the cluster has 1 CPU and 4 GPUs; waiting for one to join, 10 min" in line
    monkeypatch.setattr(cluster.module, "_PATIENCE", -1.0)
    with pytest.raises(RunError, match="choose other --gpus or --cpus, or start such a node"):
        trial.poll()
    assert trial.poll() is not None, "what ends the sweep then does not start it again"


def test_a_node_that_does_not_see_the_recipe_trains_nothing(cluster, program, monkeypatch):
    monkeypatch.setattr(cluster.module, "_SIGHT", 0.0)
    script = program(HANGS)
    trial = trial_of(cluster, script, [])
    script.unlink()
    with pytest.raises(RunError, match=r"node 10\.0\.0\.7 does not see .*recipe\.py; all nodes"):
        end_of(trial)
    assert not trial.folder.exists()


@pytest.mark.parametrize(
    ("gpus", "cpus", "jobs", "expected"),
    [
        ([8, 8], [64, 64], 1, (8, 8)),
        ([8, 8], [64, 64], 2, (8, 8)),
        ([8, 8], [64, 64], 3, (4, 4)),
        ([8, 4], [64, 64], 3, (4, 4)),
        ([1, 1], [4, 4], 5, (1 / 3, 1)),
        ([0, 2], [64, 8], 1, (2, 2)),
        ([0, 0], [8, 4], 3, (0, 4)),
        ([0], [2], 9, (0, 1)),
    ],
)
def test_what_the_nodes_have_is_divided_among_the_trials(cluster, gpus, cpus, jobs, expected):
    nodes = [{"GPU": float(g), "CPU": float(c)} for g, c in zip(gpus, cpus, strict=True)]
    share = cluster.module.divided(nodes, jobs, None, None)
    assert (share.gpus, share.cpus) == expected
    assert cluster.module.divided(nodes, jobs, 3, 5) == cluster.module.Resources(5, 3)


WORDS = ("optim.adamw.learning_rate=1e-4,1e-3", "--sampler", "grid")


def test_without_a_cluster_nothing_begins(cluster, tmp_path, monkeypatch):
    project = Project(tmp_path / "project")
    said = refused("sweep", project.recipe, *WORDS, "--on", "ray")
    assert "no Ray cluster at auto (Could not find any running Ray instance.); start one " in said
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    said = refused("sweep", project.recipe, *WORDS, "--on", "ray")
    assert f"no Ray cluster at 127.0.0.1:{port} ([Errno 111] Connection refused); start" in said
    assert not Path(f"{project.run}-sweep").exists()
    said = refused("sweep", project.recipe, *WORDS, "--gpus", "1")
    assert "--gpus and --cpus are for --on ray" in said


def test_without_ray_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    project = Project(tmp_path / "project")
    said = refused("sweep", project.recipe, *WORDS, "--on", "ray")
    assert "Ray is not installed: pip install -e '.[ray]'" in said
