"""One S3 server for all tests of a process, and a bucket for each."""

import subprocess
from types import SimpleNamespace

import fsspec
import pytest

import warm
from surefoot.storage import child

from . import stores


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    """The process that uploads has imported; one of a process of its own starts as a user's."""
    names = {name: getattr(subprocess, name) for name in ("PIPE", "DEVNULL", "TimeoutExpired")}

    def popen(command, **options):
        is_warm = "surefoot.plugins.cloud.mirror" in command
        return (warm.Popen if is_warm else subprocess.Popen)(command, **options)

    monkeypatch.setattr(child, "subprocess", SimpleNamespace(Popen=popen, **names))


@pytest.fixture(scope="session")
def running():
    for name in ("moto", "s3fs", "flask"):
        pytest.importorskip(name)
    made = stores.Server()
    yield made
    made.close()


@pytest.fixture
def server(running, monkeypatch):
    """The S3 of this process and those it starts; ``rule`` lets it fail."""
    running.is_well()
    stores.point_at(monkeypatch, running.port)
    # fsspec keeps file systems, with what they have listed
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    return running


@pytest.fixture
def bucket(server):
    """One of its own for a test, which never fails when it is looked at from here."""
    return stores.Bucket(server.port)


@pytest.fixture
def memory():
    """The store that lives in this process, empty."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]
