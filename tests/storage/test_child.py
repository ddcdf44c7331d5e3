"""Children: what they are told, how they end, and that nothing of them remains."""

import os
import signal
import time
from pathlib import Path

import pytest

from surefoot.storage.child import Child

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
DEAF = "import time; time.sleep(600)"
# its own child ignores SIGTERM, and says its number in a file
FAMILY = """
import signal, subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
print(subprocess.Popen([sys.executable, "-c", code]).pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def started(tmp_path):
    made = []

    def start(code, **options):
        made.append(Child(["-c", code], **options))
        return made[-1]

    yield start
    for child in made:
        child.end()


def test_messages_come_back_whole_and_in_order(started):
    child = started(ECHO, talks=True)
    long = {"text": "x" * 300_000}
    assert child.send({"number": 1})
    assert child.answer(20) == {"number": 1}
    assert child.answer(0) is None
    assert child.send({"number": 2})
    assert child.send({"number": 3})
    assert [child.answer(20), child.answer(20)] == [{"number": 2}, {"number": 3}]
    assert not started(DEAF, talks=True).send(long, wait=False)


def test_one_that_has_ended_says_how(started):
    child = started("raise SystemExit(3)", talks=True)
    with pytest.raises(EOFError):
        child.answer(20)
    assert (child.ending, child.killed_by) == ("with code 3", None)
    assert not child.send({"late": True})
    killed = started(DEAF)
    os.kill(killed.process.pid, signal.SIGKILL)
    assert (killed.ending, killed.killed_by) == ("by SIGKILL", "SIGKILL")


def test_its_end_is_that_of_all_that_it_has_started(started, tmp_path):
    log = tmp_path / "log"
    child = started(FAMILY, log=log, patience=0)
    while not (said := log.read_text().strip()):
        assert child.code is None
    child.end()
    assert child.killed_by == "SIGKILL"
    state = Path("/proc", said, "stat")
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)  # until it is dead, buried or not
