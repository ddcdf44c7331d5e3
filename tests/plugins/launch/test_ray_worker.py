"""A rank in a worker of Ray, and the driver, with modules that stand for Ray's."""

import json
import os
import signal
import time
from types import SimpleNamespace

import pytest

from project import Project, checkpoints
from surefoot.errors import LostPeerError, RunError
from surefoot.recipe.recipe import dump, load
from surefoot.storage.remote import Address
from surefoot.training.callbacks.launches import STOP


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path / "project", checkpoint={"save_steps": 1000})


def config(project):
    return {"recipe": dump(load(project.recipe)), "command": "surefoot launch recipe.yaml"}


def test_a_rank_trains_at_a_port_of_its_own_and_returns_what_the_driver_says(on_ray, project):
    assert on_ray.train_rank(config(project)) == {"signal": 0, "skipped": 0, "step": 12}
    assert os.environ["MASTER_PORT"] != "1"
    first = (project.run / "launches.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["command"] == "surefoot launch recipe.yaml"


def test_an_error_of_the_user_is_returned_and_not_raised(on_ray, project):
    project.sections["data"]["datasets"] = ["missing"]
    project.write()
    assert "dataset 'missing'" in on_ray.train_rank(config(project))["error"]


def test_an_error_that_another_start_may_mend_is_raised(on_ray, project, monkeypatch):
    def lose(*_, **__):
        raise LostPeerError("rank 1 is gone")

    monkeypatch.setattr(on_ray, "run", lose)
    with pytest.raises(LostPeerError):
        on_ray.train_rank(config(project))
    monkeypatch.setattr(on_ray, "get_context", lambda: SimpleNamespace(get_world_rank=lambda: 1))
    assert on_ray.train_rank(config(project)) == {}, "rank 0 may have left with a user's error"


def test_a_notice_of_a_preemption_is_a_checkpoint_once(on_ray, project, monkeypatch):
    monkeypatch.setattr(on_ray, "_LOOK", 0.0)
    monkeypatch.setattr(on_ray, "get_preemption_info", lambda: "soon")
    on_ray.train_rank(config(project))
    first, last = checkpoints(project.run)
    assert (first.name == "checkpoint-12", last.name) == (False, "checkpoint-12")


def fitting(until, value):
    """A trainer that ends when ``until()``, with what rank 0 returns."""

    def fit():
        deadline = time.monotonic() + 20
        while not until():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return SimpleNamespace(return_value=value)

    return SimpleNamespace(fit=fit)


def test_a_signal_to_the_driver_is_a_request_in_the_folder_of_the_run(on_ray, tmp_path):
    driver, before = on_ray.RayDriver(tmp_path), signal.getsignal(signal.SIGTERM)

    def until():
        if driver.received is None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        return (tmp_path / STOP).exists()

    assert driver.fit(fitting(until, {"step": 3})) == {"step": 3}
    assert driver.received == signal.SIGTERM
    assert not (tmp_path / STOP).exists()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_run_that_ray_has_given_up_may_be_started_again(on_ray, tmp_path):
    def fit():
        raise InterruptedError("worker 1 died\nand a traceback")

    with pytest.raises(LostPeerError, match=r"Ray has given up: worker 1 died$"):
        on_ray.RayDriver(tmp_path).fit(SimpleNamespace(fit=fit))


def test_a_signal_to_the_driver_is_a_request_in_the_store_of_the_run(on_ray, tmp_path, monkeypatch):
    monkeypatch.setattr(on_ray, "_AGAIN", 0.0)
    asked = []

    def stop(address, *, wait):
        asked.append((address, wait))
        if len(asked) == 1:
            raise RunError("no run is stored there")
        return iter(["requested"])

    monkeypatch.setattr(on_ray, "stores", lambda: SimpleNamespace(stop=stop))
    driver = on_ray.RayDriver(tmp_path, Address("s3://bucket/run"))

    def until():
        if driver.received is None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        return len(asked) > 1

    assert driver.fit(fitting(until, {"step": 3})) == {"step": 3}
    assert asked[:2] == [("s3://bucket/run", False)] * 2
    assert not (tmp_path / STOP).exists()


def test_the_files_of_ray_are_beside_those_of_the_run(on_ray, project):
    from surefoot.plugins.launch.request import LaunchRequest

    usual = {"recipe": project.recipe, "name": "first"}
    shown = on_ray.document(LaunchRequest(**usual, output_dir="s3://bucket/run", nodes=2))
    assert "storage_path: s3://bucket/run/.ray" in shown
    with pytest.raises(
        RunError, match=r"--set storage=\.\.\. is missing: Ray cannot keep .* sftp://"
    ):
        on_ray.document(LaunchRequest(**usual, output_dir="sftp://bucket/run"))
    shown = on_ray.document(LaunchRequest(**usual, output_dir="/run", min_nodes=1, nodes=2, gpus=1))
    assert "num_workers: [1, 2]" in shown
    assert "GPU: 1" in shown
    assert "storage_path: /run/.ray" in shown
