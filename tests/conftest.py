"""What every test may rely on: one thread, no network, a cache of its own."""

import gc
import itertools
import logging
import os
import signal
import subprocess
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first product on a GPU
os.environ["HF_HUB_OFFLINE"] = "1"

import forks  # it makes every fork of a test fit for threads
import slow
from surefoot.checkpoint.saving import _writer_process as writer_process

hypothesis.settings.register_profile("surefoot", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("surefoot")

forks.HAS_WATCH = False
forks.put(writer_process)  # what it starts has imported
NUMBERS = itertools.count()
SLOW = {slow.TESTS / name for name in slow.LIST.read_text().split()}
SHARED = Path(__file__).parent.parent.parent / "shared"


# On a GPU, torch and Triton warn of much that is of no interest to tests; not so of sums whose
# order is left to chance.
CALM = pytest.mark.filterwarnings("default::UserWarning", "error:.*determinis.*:UserWarning")


def pytest_addoption(parser):
    """What ``make check`` runs."""
    parser.addoption("--fast", action="store_true", help="leave out the modules of slow.txt")


def pytest_ignore_collect(collection_path, config):
    """A module that is left out is not imported."""
    if config.getoption("--fast") and collection_path.suffix == ".py":
        return collection_path in SLOW or None
    return None


def pytest_itemcollected(item):
    """Tests that run on a GPU have their own warnings there."""
    if item.get_closest_marker("gpu"):
        import torch

        if torch.cuda.is_available():
            item.add_marker(CALM)


def pytest_collection_finish(session):
    """Let no collection of garbage look through all that was imported, here or in a fork.

    The Trainer collects at the start of every run: two seconds of two million objects.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _where_models_are_kept(tmp_path_factory):
    """Those that ``folders`` makes once."""
    os.environ["SUREFOOT_TESTS_KEPT"] = str(tmp_path_factory.getbasetemp())


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    """Encoded datasets of tests go to a temporary folder, never to the user's cache.

    ``mktemp`` looks at all folders for the next number: 5 ms of a core where they are 6,000.
    """
    folder = tmp_path_factory.getbasetemp() / "caches" / str(next(NUMBERS))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


@pytest.fixture(autouse=True)
def _writers_that_are_tested_start_as_those_of_users(request, monkeypatch):
    """Cold, with nothing imported, which takes as long as some steps of a tiny model. On a GPU all
    do: CUDA does not survive a fork."""
    if any(map(request.node.get_closest_marker, ("cold_writer", "gpu"))):
        monkeypatch.setattr(writer_process, "subprocess", subprocess)


@pytest.fixture(autouse=True)
def _log_as_imported():
    """What a command set for the log of its process ends before the next test."""
    log = logging.getLogger("surefoot")
    log.setLevel(logging.NOTSET)
    log.propagate, log.handlers[:] = True, []


@pytest.fixture(autouse=True)
def _signals_end_what_is_started():
    """A handler that a test leaves would be inherited, and lm-eval's pool of workers, which it ends
    by SIGTERM, would wait for ever."""
    signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in signals]
    yield
    for number, handler in zip(signals, before, strict=True):
        signal.signal(number, handler or signal.SIG_DFL)


@pytest.fixture
def shared():
    """The folder of real models and datasets beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared, the folder of real models and datasets")
    return SHARED
