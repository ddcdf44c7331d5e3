"""``surefoot stop`` on a run in a bucket, from a machine that sees nothing else of it."""

import json
import sys
import threading
import time

import pytest

import commands
import warm
from project import Project, losses, start, surefoot
from surefoot.errors import RunError
from surefoot.plugins.cloud import stopping
from surefoot.plugins.cloud.checkpoints import Contents, run_id
from surefoot.plugins.cloud.lineage import StoredLaunch
from surefoot.plugins.cloud.remote_run import LAUNCH, STORES
from surefoot.plugins.cloud.stopping import look
from surefoot.plugins.cloud.store import Store
from surefoot.storage.remote import Address
from surefoot.training.callbacks.launches import STOP

URL = "memory://runs/tiny"
_, ok, refused = commands.of("stop")


@pytest.fixture
def store(memory, tmp_path, monkeypatch):
    """Of a run with two launches, neither of which looks."""
    monkeypatch.setattr(stopping, "_PAUSE", 0.01)
    monkeypatch.setattr(stopping, "_PATIENCE", 0.05)
    made = Store(Address(URL), seconds=0)
    made.create(".run-id", run_id(tmp_path))
    made.write("checkpoint-4/manifest.json", b"{}")
    for launch in (StoredLaunch(1), StoredLaunch(2, ((4, 1),), "vm-3", 1852)):
        made.write(launch.file, launch.dump())
    return made


def record(store, *events, place="launch-2/"):
    lines = [json.dumps(event) + "\n" for event in events]
    store.write(f"{place}launches.jsonl", "".join(lines).encode())


def ends(outcome, **facts):
    return {"event": "end", "outcome": outcome, "step": 5, **facts}


class Launch:
    """What trains: it looks, stops, and sends its record."""

    def __init__(self, store, folder, *events):
        self.store, self.folder, self.events = store, folder, events

    def __enter__(self):
        self.thread = threading.Thread(target=self._live)
        self.thread.start()

    def _live(self):
        deadline = time.monotonic() + 20
        while not (self.folder / STOP).exists() and time.monotonic() < deadline:
            look(self.store, self.folder, 2)
        for number in range(1, len(self.events) + 1):
            record(self.store, *self.events[:number])
            time.sleep(0.03)

    def __exit__(self, *_):
        self.thread.join()


def test_the_latest_launch_is_stopped_and_waited_for(store, tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "_PATIENCE", 20)
    before = [{"event": "launch"}, ends("failed"), {"event": "launch"}]
    record(store, *before)
    record(store, {"event": "launch"}, ends("complete"), place="")  # of the first one
    with Launch(store, tmp_path, *before, {"event": "log"}, ends("stopped")):
        said = commands.run("stop", URL)
    assert said.exit_code == 0
    assert "requested of launch 2 (on vm-3, process 1852), which looks every 15 s" in said.stderr
    assert f"{URL}: stopped at step 5, saved" in said.stderr
    assert not [name for name in store.list() if name.endswith(".stop")]


def test_a_run_that_failed_meanwhile_was_not_stopped(store, tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "_PATIENCE", 20)
    with Launch(store, tmp_path, {"event": "launch"}, ends("failed", error="no\x1b[2J room")):
        said = refused(URL)
    assert "the run has ended, and not by a stop: no" in said
    assert "\x1b" not in said


@pytest.mark.parametrize(
    ("events", "known"),
    [
        ([{"event": "launch"}, ends("complete")], "it is complete at step 5"),
        ([ends("complete"), {"event": "launch"}], "it is killed"),
        ([], "it is killed"),
    ],
)
def test_a_launch_that_does_not_look_is_named(store, events, known):
    record(store, *events)
    said = refused(URL)
    assert f"{URL}: no process is known to train there: launch 2 (on vm-3, process 1852)" in said
    assert known in said
    assert not [name for name in store.list() if name.endswith(".stop")], "it is withdrawn"


def test_no_run_is_named(memory):
    assert "no run is stored there; name the URL of a run" in refused(URL)
    assert "has no folder" in refused("s3://")


def test_it_is_of_one_launch_and_of_one_start(store, tmp_path):
    ok(URL, "--no-wait")
    assert ".launches/00002.stop" in store.list()
    for other in (1, 3):
        look(store, tmp_path, other)
        assert not (tmp_path / STOP).exists()
    stored = STORES.open_run(Address(URL), tmp_path, seconds=0)
    (tmp_path / LAUNCH).write_bytes(b"2")  # the same launch starts again
    assert stored.mirror(tmp_path / "checkpoint-4") is not None
    assert ".launches/00002.stop" not in store.list()


def test_what_cannot_be_requested_here_is_looked_for_again(store, tmp_path, monkeypatch):
    def fails(folder):
        raise RunError("no space left")

    ok(URL, "--no-wait")
    with monkeypatch.context() as patch:
        patch.setattr(stopping, "request_stop", fails)
        look(store, tmp_path, 2)
    assert ".launches/00002.stop" in store.list()
    look(store, tmp_path, 2)
    assert (tmp_path / STOP).exists()


def test_the_process_that_uploads_looks(bucket, tmp_path):
    bucket.put(".launches/00003.stop", b"")
    command = [sys.executable, "-P", "-m", "surefoot.plugins.cloud.mirror"]
    command += [bucket.url, str(tmp_path), "5", "3"]
    process = warm.Popen(command, stdin=-1, stdout=-1)
    deadline = time.monotonic() + 60
    while bucket.names() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.communicate()
    assert (tmp_path / STOP).exists()
    assert bucket.names() == []


@pytest.mark.proof
def test_a_run_is_stopped_from_elsewhere_and_continues(bucket, tmp_path, monkeypatch):
    project = Project(tmp_path / "p", train={"max_steps": 100_000})
    given = [f"train.output_dir={bucket.url}", "checkpoint.save_steps=1000000"]
    process = start("train", project.recipe, *given, f"train.cache_dir={tmp_path / 'one'}")
    deadline = time.monotonic() + 60
    while not any(losses(path.parent) for path in tmp_path.glob("one/*/metrics.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    code, _, err = surefoot("stop", bucket.url)
    process.communicate(timeout=60)
    assert (code, process.returncode) == (0, 130), err
    (step,) = bucket.committed()
    assert f"{bucket.url}: stopped at step {step}, saved" in err
    assert not [name for name in bucket.names() if name.endswith(".stop")]
    steps = f"train.max_steps={step + 3}"
    code, _, err = surefoot("train", project.recipe, *given, steps)
    assert code == 0, err
    assert bucket.committed() == [step, step + 3]
    launches = Contents.of(Store(Address(bucket.url))).launches
    assert sorted(launches) == [1, 2]
