"""Several processes of one machine in an object store: what they saved, any number goes on from."""

import json
import shutil
import signal

import pytest

from project import Project, losses, start, surefoot
from surefoot.checkpoint.verification import verify

CLOSE = 2e-5  # of losses after some steps of Adam: sums in another order
OPTIM = {"adamw": {"learning_rate": 0.003, "schedule": "constant"}}  # runs here change their length
COUNT = "parallel.num_processes"


def train(project, url, cache, *overrides, code=0):
    place = [f"train.output_dir={url}", f"train.cache_dir={cache}"] if url else []
    found, _, err = surefoot("train", project.recipe, *place, *overrides)
    assert found == code, err
    return next(iter(cache.glob("*"))) if url else project.run


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return Project(tmp_path_factory.mktemp("project") / "p", optim=OPTIM, train={"max_steps": 6})


@pytest.fixture(scope="module")
def alone(project):
    return losses(train(project, None, None))


def assert_follows(folder, expected):
    found = losses(folder)
    assert found.keys() == expected.keys()
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, abs=CLOSE)


@pytest.mark.proof
def test_two_save_to_s3_and_one_goes_on_on_an_empty_machine(project, alone, bucket, tmp_path):
    folder = train(project, bucket.url, tmp_path / "a", f"{COUNT}=2", "train.max_steps=4")
    assert bucket.committed() == [3, 4]
    assert bucket.get("metrics.jsonl") == (folder / "metrics.jsonl").read_bytes()
    files = json.loads(bucket.get("checkpoint-4/manifest.json"))["files"]
    assert {"rank_00000", "rank_00001"} <= {name.partition("/")[0] for name in files}
    folder = train(project, bucket.url, tmp_path / "b")
    assert bucket.committed() == [3, 4, 6]
    assert_follows(folder, alone)
    copy = tmp_path / "copy"
    bucket.download(copy)
    assert all(verify(path, full=True).ok for path in copy.glob("checkpoint-*"))


@pytest.mark.proof
def test_two_go_on_from_one_with_an_adapter_and_a_folder_as_store(tmp_path):
    project = Project(tmp_path / "p", optim=OPTIM, method={"lora": {"rank": 2}})
    url, cache = f"file://{tmp_path}/mounted/run", tmp_path / "cache"
    train(project, url, cache, "train.max_steps=2")
    shutil.rmtree(cache)
    train(project, url, cache, f"{COUNT}=2", "train.max_steps=4", "checkpoint.keep=1")
    there = tmp_path / "mounted" / "run"
    names = ["checkpoint-2", "checkpoint-4.launch-2"]  # where from, and of another machine
    assert sorted(path.name for path in there.glob("checkpoint-*")) == names
    expected = losses(train(project, None, None, "train.max_steps=4"))
    assert_follows(there, expected)


@pytest.mark.proof
def test_sigterm_to_two_saves_and_uploads_and_three_go_on(project, alone, bucket, tmp_path):
    options = [f"train.output_dir={bucket.url}", "train.global_batch_size=6"]
    options += ["train.micro_batch_size=1", "checkpoint.save_steps=null"]
    first = [*options, f"train.cache_dir={tmp_path / 'a'}", f"{COUNT}=2", "train.max_steps=500"]
    process = start("train", project.recipe, *first)
    while process.poll() is None and not list((tmp_path / "a").glob("*/metrics.jsonl")):
        pass
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, err
    (step,) = bucket.committed()
    last = f"train.max_steps={step + 2}"
    train(project, bucket.url, tmp_path / "b", *options[1:], f"{COUNT}=3", last)
    assert bucket.committed() == [step, step + 2]
