"""One S3 server for all tests of a process, a bucket for each, and a proxy that can fail."""

import subprocess
from types import SimpleNamespace

import fsspec
import pytest

import warm
from surefoot.storage import child

from .stores import Bucket, Proxy, moto, point_at


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    """The process that uploads has imported; one of a process of its own starts as a user's."""
    names = {name: getattr(subprocess, name) for name in ("PIPE", "DEVNULL", "TimeoutExpired")}

    def popen(command, **options):
        is_warm = "surefoot.plugins.cloud.mirror" in command
        return (warm.Popen if is_warm else subprocess.Popen)(command, **options)

    monkeypatch.setattr(child, "subprocess", SimpleNamespace(Popen=popen, **names))


@pytest.fixture(scope="session")
def server():
    with moto() as port:
        yield port


@pytest.fixture
def bucket(server, monkeypatch):
    point_at(monkeypatch, server)
    _forget_connections()
    return Bucket(server)


@pytest.fixture
def proxy(server, monkeypatch):
    made = Proxy(server)
    point_at(monkeypatch, made.port)
    _forget_connections()
    yield made
    made.close()


@pytest.fixture
def weak(proxy, server):
    """A bucket behind the proxy; seen from here it never fails."""
    return Bucket(server)


@pytest.fixture
def memory():
    """The store that lives in this process, empty."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


def _forget_connections():
    """File systems are kept by fsspec, with the address of the server of an earlier test."""
    for name in ("s3",):
        fsspec.get_filesystem_class(name).clear_instance_cache()
