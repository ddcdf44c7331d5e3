"""Each tracker's own package, offline: two launches of one run are one curve with every step once.

The files are read by the packages' own readers, or by their own message formats.
"""

import json
import struct
from importlib.util import find_spec

import pytest

from surefoot.training.callbacks import trackers as launching
from surefoot.training.callbacks.trackers import TrackerProcess, finish

NAMES = [name for name in ("wandb", "mlflow", "swanlab", "trackio") if find_spec(name)]
pytestmark = [
    pytest.mark.proof,  # the packages import for ten seconds in all
    pytest.mark.skipif(not NAMES, reason="no tracker is installed"),
]
CONFIG = {"model": {"path": "qwen"}, "optim": {"adamw": {"learning_rate": 0.1}}}


def needs(name):
    return pytest.mark.skipif(name not in NAMES, reason=f"{name} is not installed")


def line(step, **values):
    return json.dumps({"step": step, "epoch": step / 2, **values}) + "\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose first launch died after step 4, and whose second one repeated steps 3 and 4."""
    folder = tmp_path_factory.mktemp("home") / "run"
    folder.mkdir()
    away = {
        "HOME": str(folder.parent),
        "MLFLOW_TRACKING_URI": (folder.parent / "mlruns").as_uri(),
        "TRACKIO_DIR": str(folder.parent / "trackio"),
    }
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(launching, "FINISH", 200.0)  # a machine under load
    order = {"folder": str(folder), "run_name": "run", "project": "p1", "config": CONFIG}

    def launch(*lines, outcome):
        processes = [TrackerProcess(name, {**order, "is_offline": True}, away) for name in NAMES]
        for one in processes:
            one.start()
        with (folder / "metrics.jsonl").open("a") as file:
            file.writelines(lines)
        finish(processes, outcome=outcome)

    losses = [line(step, loss=1 / step) for step in range(1, 5)]
    launch(*losses, outcome="died")
    launch(line(4, eval_loss=0.5), line(5, loss=None), line(6, loss=1 / 6), outcome="complete")
    monkeypatch.undo()
    return folder


CURVE = [(1, 1.0), (2, 1 / 2), (3, 1 / 3), (4, 1 / 4), (5, None), (6, 1 / 6)]


def same(found):
    assert [step for step, _ in found] == [step for step, _ in CURVE]
    for (_, value), (_, expected) in zip(found, CURVE, strict=True):
        is_nan = value != value or value in (None, "NaN")
        assert is_nan if expected is None else value == pytest.approx(expected)


@needs("wandb")
def test_wandb_has_one_run_in_the_files_of_both_launches(run):
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    rows, runs = [], []
    for path in sorted(run.glob("trackers/wandb/wandb/offline-run-*/*.wandb")):
        for data in leveldb_records(path.read_bytes()):
            record = pb.Record.FromString(data)
            if record.HasField("history"):
                items = record.history.item
                rows.append({i.key or i.nested_key[0]: json.loads(i.value_json) for i in items})
            if record.HasField("run"):
                runs.append(record.run)
    assert len(runs) == 2
    assert {(one.run_id, one.project, one.display_name) for one in runs} == {
        (json.loads((run / "trackers/wandb.json").read_text())["id"], "p1", "run")
    }
    settings = {u.key: json.loads(u.value_json) for u in runs[0].config.update}
    assert settings["optim"] == CONFIG["optim"]
    same([(r["train/global_step"], r["train/loss"]) for r in rows if "train/loss" in r])
    assert [r["_step"] for r in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [r["eval/loss"] for r in rows if "eval/loss" in r] == [0.5]


def leveldb_records(data):
    """The records of a log of LevelDB, which W&B's files are after a head of 7 bytes."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if (rest := 32768 - at % 32768) < 7:
            at += rest
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # full, last
            yield whole
            whole = b""


@needs("mlflow")
def test_mlflow_has_one_finished_run(run, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = pytest.importorskip("mlflow").MlflowClient((run.parent / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("p1").experiment_id
    (only,) = client.search_runs([experiment])
    assert (only.info.status, only.info.run_name) == ("FINISHED", "run")
    assert only.data.params["optim.adamw.learning_rate"] == "0.1"
    found = client.get_metric_history(only.info.run_id, "train/loss")
    same([(one.step, one.value) for one in found])
    assert [m.step for m in client.get_metric_history(only.info.run_id, "eval/loss")] == [4]


@needs("swanlab")
def test_swanlab_has_one_run_in_the_files_of_both_launches(run):
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found, ids = [], []
    for path in sorted(run.glob("trackers/swanlab/run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(path)
        for data in reader:
            record = Record.FromString(data)
            if record.HasField("start"):
                ids.append((record.start.id, record.start.project, record.start.name))
            if record.HasField("scalar") and record.scalar.key == "train/loss":
                found.append((record.scalar.step, record.scalar.value.number))
        reader.close()
    id_ = json.loads((run / "trackers/swanlab.json").read_text())["id"]
    assert ids == [(id_, "p1", "run")] * 2
    same(found)


@needs("trackio")
def test_trackio_has_one_run(run, monkeypatch):
    storage = pytest.importorskip("trackio.sqlite_storage")
    monkeypatch.setattr(storage, "TRACKIO_DIR", run.parent / "trackio")
    (only,) = storage.SQLiteStorage.get_run_records("p1")
    id_ = json.loads((run / "trackers/trackio.json").read_text())["id"]
    assert only["name"] == f"run-{id_[:6]}"
    logs = storage.SQLiteStorage.get_logs("p1", only["name"])
    same([(log["step"], log["train/loss"]) for log in logs if "train/loss" in log])
