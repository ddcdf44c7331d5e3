"""A pytest plugin: one JSON line for each test as it ends, so that a stopped run loses one test.

Environment variables: ``SUREFOOT_OUTCOMES`` is the file, whose first line has the tests to leave
out (``done``) and those to run last (``late``); ``SUREFOOT_DEADLINE`` is the second by
``time.monotonic`` after which no test starts. A test that hangs for ``SUREFOOT_PATIENCE`` seconds
ends the process; one that has broken the GPU's context ends the session, as every later test would
fail.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from pathlib import Path

import pytest

LONGEST = 1500  # characters of a message
# seconds of a test, the compilation of its kernels included
PATIENCE = float(os.environ.get("SUREFOOT_PATIENCE", "150"))
STDERR = os.fdopen(os.dup(2), "w")  # the program's own: pytest captures that of tests
IS_WORKER = bool(os.environ["PYTEST_XDIST_WORKER"])  # whose outcomes the main process writes


def _write(**record: object) -> None:
    if IS_WORKER:
        return
    with Path(os.environ["SUREFOOT_OUTCOMES"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what stands already."""
    with Path(os.environ["SUREFOOT_OUTCOMES"]).open(encoding="utf-8") as file:
        known = json.loads(file.readline())
    done, late = set(known["done"]), set(known["late"])
    if not IS_WORKER:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    left = [item for item in items if item.nodeid not in done]
    items[:] = sorted(left, key=lambda item: item.nodeid in late)


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test that never ends is known by its start."""
    _write(test=nodeid, outcome="started", seconds=0.0, message="")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start nothing that would end after the deadline."""
    if time.monotonic() > float(os.environ["SUREFOOT_DEADLINE"]):
        item.session.shouldstop = "the time is over"
    faulthandler.dump_traceback_later(PATIENCE, exit=True, file=STDERR)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Start no further test on a GPU whose context an illegal access has broken."""
    faulthandler.cancel_dump_traceback_later()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            item.session.shouldstop = f"the GPU's context is broken: {error}"


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported is a failure of its own; the others still run."""
    if report.failed:
        text = report.longreprtext[-LONGEST:]
        _write(test=report.nodeid, outcome="failed", seconds=0.0, message=text)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test has ended, or failed on the way."""
    if report.when != "call" and report.outcome == "passed":
        return
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    seconds, outcome = report.duration, report.outcome
    _write(test=report.nodeid, outcome=outcome, seconds=seconds, message=text[-LONGEST:])
