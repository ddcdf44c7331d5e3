"""Modules that stand for Ray's, where what surrounds it is tried."""

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest

NAMES = ("ray", "ray.exceptions", "ray.train", "ray.train.collective", "ray.train.torch")


@pytest.fixture
def on_ray(monkeypatch):
    """The module, with a cluster of one worker that has no notice."""
    modules = {name: ModuleType(name) for name in NAMES}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    modules["ray"].train = modules["ray.train"]
    modules["ray.exceptions"].RayError = OSError
    for name in ("FailureConfig", "RunConfig", "ScalingConfig"):
        setattr(modules["ray.train"], name, SimpleNamespace)
    modules["ray.train"].TrainingFailedError = InterruptedError
    modules["ray.train"].get_context = lambda: SimpleNamespace(get_world_rank=lambda: 0)
    modules["ray.train"].get_preemption_info = lambda: None
    modules["ray.train.collective"].broadcast_from_rank_zero = lambda value: value
    modules["ray.train.torch"].TorchConfig = modules["ray.train.torch"].TorchTrainer = (
        SimpleNamespace
    )
    for name in ("surefoot.plugins.launch.on_ray", "surefoot.parallel.ray_cluster"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")
    yield import_module("surefoot.plugins.launch.on_ray")
    for name in ("surefoot.plugins.launch.on_ray", "surefoot.parallel.ray_cluster"):
        sys.modules.pop(name)
