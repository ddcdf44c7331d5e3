"""Runs in object stores: what was uploaded is enough to go on from, on any machine, to the bit."""

import fcntl
import json
import random
import shutil
import signal
import threading
import time
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import commands
from project import Project, assert_same, checkpoints, losses, start
from surefoot.checkpoint.verification import verify
from surefoot.cli.main import main
from surefoot.cli.replay import local_run
from surefoot.errors import CheckpointError, RunError, SurefootError
from surefoot.plugins.cloud.mirror import LOCK
from surefoot.plugins.cloud.remote_run import STORES
from surefoot.recipe.recipe import load
from surefoot.run.training_run import run
from surefoot.storage.remote import Address
from surefoot.use import locate

from . import stores

# A run of which every third request fails meets the others.
PROOF = [pytest.param(fault, marks=pytest.mark.proof) for fault in ("drop", 503)]


def train(project, url=None, cache=None, **overrides):
    """Train in this process; the folder it worked in."""
    options = {name.replace("__", "."): value for name, value in overrides.items()}
    if url is not None:
        options["train.output_dir"] = str(url)
    if cache is not None:
        options["train.cache_dir"] = str(cache)
    recipe = load(project.recipe, [f"{name}={json.dumps(v)}" for name, v in options.items()])
    run(recipe)
    return recipe.train.folder


def wait_until(happened):
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def killed(project, url, *arguments, when):
    """Train in a process of its own (a fork would share connections), and kill it."""
    process = start("train", project.recipe, f"train.output_dir={url}", *arguments)
    wait_until(when)
    process.kill()
    process.communicate()


def is_idle(folder):
    """Whether no process uploads from ``folder``."""
    with (folder / LOCK).open("rb+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def weights(folder):
    names = ["rank_00000/model.safetensors", "model.safetensors", "adapter_model.safetensors"]
    return load_file(next(folder / name for name in names if (folder / name).is_file()))


def made(folder, **sections):
    """A project whose learning rate does not depend on how long the run is."""
    optim = {"adamw": {"learning_rate": 0.003, "schedule": "constant"}}
    return Project(folder, optim=optim, **sections)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return made(tmp_path_factory.mktemp("project") / "p", train={"max_steps": 6})


@pytest.fixture(scope="module")
def whole(project):
    """The folder of a run that was never stopped, and lay here all the time."""
    return train(project)


def assert_is(folder, whole):
    """The run in ``folder`` is the one that was never stopped."""
    assert losses(folder) == losses(whole)
    assert checkpoints(folder)[-1].name == checkpoints(whole)[-1].name
    assert_same(weights(checkpoints(folder)[-1]), weights(checkpoints(whole)[-1]))


def test_a_run_in_s3_goes_on_on_a_fresh_machine_to_the_bit(project, whole, bucket, tmp_path):
    train(project, bucket.url, tmp_path / "one", checkpoint__save_steps=4)
    assert bucket.committed() == [4, 6]
    for key in [key for key in bucket.names() if key.startswith("checkpoint-6/")]:
        bucket.delete(key)  # as if the machine had died before
    folder = train(project, bucket.url, tmp_path / "two", checkpoint__save_steps=4)
    assert bucket.committed() == [4, 6]
    assert_is(folder, whole)
    assert {"recipe.yaml", "metrics.jsonl", "loss.png", "all_results.json"} <= set(bucket.names())
    assert bucket.get("launch-2/metrics.jsonl") == (folder / "metrics.jsonl").read_bytes()


def test_a_run_behind_the_gateway_of_the_hub_goes_on(project, whole, bucket, server, tmp_path):
    """Against a server with the rules of the gateway, not against the Hub."""
    server.is_strict = True
    train(project, bucket.url, tmp_path / "one", checkpoint__save_steps=2, train__max_steps=4)
    folder = train(project, bucket.url, tmp_path / "two", checkpoint__save_steps=2)
    assert_is(folder, whole)
    assert bucket.committed() == [2, 4, 6]
    code = CliRunner().invoke(main, ["ckpt", "verify", f"{bucket.url}/checkpoint-6"]).exit_code
    assert (code, server.refused) == (0, [])


@pytest.mark.proof
def test_a_run_in_memory_is_the_same_run(project, whole, memory, tmp_path):
    folder = train(project, "memory://runs/tiny", tmp_path, checkpoint__save_steps=4)
    assert_is(folder, whole)
    shutil.rmtree(folder)
    folder = train(project, "memory://runs/tiny", tmp_path)  # complete: nothing is to be done
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-6"]
    assert losses(folder) == losses(whole)


def test_a_mounted_folder_is_a_store_too(project, whole, tmp_path):
    url = f"file://{tmp_path}/mounted/run"
    train(project, url, tmp_path / "one", checkpoint__keep=1)
    assert sorted(path.name for path in (tmp_path / "mounted/run").iterdir()) == [
        ".launches",
        ".run-id",
        "README.md",
        "all_results.json",
        "checkpoint-6",
        "launches.jsonl",
        "loss.png",
        "metrics.jsonl",
        "recipe.yaml",
        "rows.f32",
        "rows.xxh",
        "steps.bin",
    ]
    last = (tmp_path / "mounted/run/launches.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["outcome"] == "complete", "the record is there before the last upload"
    assert_is(train(project, url, tmp_path / "two"), whole)


@pytest.mark.proof
def test_what_a_plain_copy_brings_opens_with_from_pretrained(project, bucket, tmp_path):
    for layout in ("distributed", "full"):
        url = f"{bucket.url}/{layout}"
        train(project, url, tmp_path / "cache", train__max_steps=2, checkpoint__layout=layout)
        bucket.download(tmp_path / "copy")
        copied = tmp_path / "copy" / layout / "checkpoint-2"
        assert verify(copied, full=True).ok
        opened = AutoModelForCausalLM.from_pretrained(copied).state_dict()
        stored = weights(copied)
        assert all((opened[name] == stored[name]).all() for name in stored)


@pytest.mark.proof
def test_retention_deletes_in_the_store_too(project, bucket, tmp_path):
    options = {"checkpoint__save_steps": 1, "checkpoint__keep": 2}
    train(project, bucket.url, tmp_path / "one", train__max_steps=4, **options)
    assert bucket.committed() == [3, 4]
    train(project, bucket.url, tmp_path / "two", **options)
    found = bucket.committed()
    assert found[-2:] == [5, 6]
    assert set(found) <= {4, 5, 6}  # the one that was gone on from stays
    assert not [key for key in bucket.names() if key.startswith(("checkpoint-2/", "checkpoint-3/"))]


@pytest.mark.proof
def test_a_machine_that_comes_back_does_not_bring_back_what_retention_let_go(
    project, whole, bucket, tmp_path
):
    options = {"checkpoint__save_steps": 1, "checkpoint__keep": 2}
    train(project, bucket.url, tmp_path / "one", train__max_steps=2, **options)
    train(project, bucket.url, tmp_path / "two", train__max_steps=4, **options)
    proof = bucket.committed()
    assert proof[-2:] == [3, 4]
    folder = train(project, bucket.url, tmp_path / "one", train__max_steps=4, **options)
    assert set(bucket.committed()) <= set(proof)
    assert checkpoints(folder)[-1].name == "checkpoint-4"
    folder = train(project, bucket.url, tmp_path / "one", **options)
    assert bucket.committed()[-2:] == [5, 6]
    assert not [step for step in bucket.committed() if step < 3]
    assert_is(folder, whole)


def test_a_damaged_checkpoint_in_the_store_is_passed_over_and_replaced(
    project, whole, bucket, tmp_path, caplog
):
    options = {"checkpoint__save_steps": 2}
    train(project, bucket.url, tmp_path / "one", **options)
    key = "checkpoint-6/rank_00000/optimizer.safetensors"
    data = bytearray(bucket.get(key))
    data[-3] ^= 1
    bucket.put(key, bytes(data))
    bucket.delete("checkpoint-4/state.json")
    caplog.set_level("INFO")
    folder = train(project, bucket.url, tmp_path / "two", **options)
    for said in ("checkpoint-6 is skipped", "checkpoint-4 is skipped", "from checkpoint-2"):
        assert said in caplog.text
    assert_is(folder, whole)
    bucket.download(tmp_path / "copy")
    names = ["checkpoint-2", "checkpoint-4.launch-2", "checkpoint-6.launch-2"]
    assert sorted(path.name for path in (tmp_path / "copy").glob("checkpoint-*")) == names
    for name in names:
        assert verify(tmp_path / "copy" / name, full=True).ok


class Held:
    """Requests that wait in the server, as those of a machine that is paused."""

    def __init__(self, server, method, part):
        self.came, self.go = threading.Event(), threading.Event()

        def rule(asked, path, count):
            if asked == method and part in path and not self.go.is_set():
                self.came.set()
                self.go.wait(120)

        server.rule = rule


@pytest.mark.parametrize(
    "part",
    [
        pytest.param("checkpoint-4/rank_00000/model", marks=pytest.mark.proof),
        "checkpoint-4/manifest.json",
    ],
)
def test_a_launch_that_wakes_up_late_changes_nothing(
    project, whole, bucket, server, tmp_path, part
):
    """Paused before it has uploaded a checkpoint, or behind its last look at other launches."""
    held = Held(server, "PUT", part)
    given = ["checkpoint.save_steps=2", "train.max_steps=4", f"train.output_dir={bucket.url}"]
    late = start("train", project.recipe, *given, f"train.cache_dir={tmp_path / 'one'}")
    assert held.came.wait(60)
    folder = train(project, bucket.url, tmp_path / "two", checkpoint__save_steps=2)
    assert_is(folder, whole)
    before = {name: bucket.get(name) for name in bucket.names() if "launch-2" in name}
    assert {name.partition("/")[0] for name in before if name.startswith("checkpoint-")} == {
        "checkpoint-4.launch-2",
        "checkpoint-6.launch-2",
    }
    held.go.set()
    _, err = late.communicate(timeout=120)
    assert late.returncode == 2, err
    assert "another launch (on " in err
    assert "has taken over this run from step 2; nothing more is saved there by this one" in err
    assert before == {name: bucket.get(name) for name in before}
    listed = CliRunner().invoke(main, ["ckpt", "ls", bucket.url]).output
    assert ("void: a later launch had taken over" in listed) == ("manifest" in part)
    shutil.rmtree(tmp_path / "two")
    again = train(project, bucket.url, tmp_path / "three", checkpoint__save_steps=2)
    assert_is(again, whole)
    code = CliRunner().invoke(main, ["ckpt", "verify", f"{bucket.url}/checkpoint-4"]).exit_code
    assert code == 0


@pytest.fixture(scope="module")
def overtaken(project, running, tmp_path_factory):
    """The URL of a run whose first launch has written its metrics once more, behind its last look,
    when the second one had ended."""
    folder, bucket = tmp_path_factory.mktemp("overtaken"), stores.Bucket(running.port)
    running.is_well()
    given = ["checkpoint.save_steps=2", "train.max_steps=4", f"train.output_dir={bucket.url}"]
    with pytest.MonkeyPatch.context() as patch:
        stores.point_at(patch, running.port)
        train(project, bucket.url, folder / "one", checkpoint__save_steps=2, train__max_steps=2)
        held, seen = Held(running, "PUT", "runs/tiny/metrics.jsonl"), []
        holds = running.rule

        def rule(method, path, count):
            if method == "PUT" and path.endswith("runs/tiny/metrics.jsonl"):
                seen.append(path)
                return holds(method, path, count) if len(seen) == 1 else None
            return None

        running.rule = rule
        late = start("train", project.recipe, *given, f"train.cache_dir={folder / 'one'}")
        assert held.came.wait(60)
        train(project, bucket.url, folder / "two", checkpoint__save_steps=2)
        before = {name: bucket.get(name) for name in bucket.names() if "launch-2" in name}
        held.go.set()
        _, err = late.communicate(timeout=120)
    running.is_well()
    assert "has taken over this run from step 2" in err
    assert before == {name: bucket.get(name) for name in before}
    steps = [json.loads(line)["step"] for line in bucket.get("metrics.jsonl").splitlines()]
    assert max(steps) == 4, "it was written late"
    return bucket.url


def opened(project, url, folder):
    """The recipe comes first."""
    stored = STORES.open_run(Address(url), folder / "run", seconds=5)
    assert load(folder / "run" / "recipe.yaml").train.max_steps == 6
    stored.get("checkpoint-6")
    return folder / "run"


READERS = {  # what writes comes last
    "a launch from one of its checkpoints": lambda project, url, folder: train(
        project,
        folder / "run",
        folder,
        checkpoint__resume=f"{url}/checkpoint-6",
        train__max_steps=8,
    ),
    "an opened run": opened,
    "a replay": lambda project, url, folder: local_run(url, 6, 6),
    "a launch on another machine": lambda project, url, folder: train(project, url, folder),
}


@pytest.mark.parametrize("reader", READERS)
def test_each_reader_takes_the_files_of_the_launch_that_counts(
    project, whole, server, overtaken, tmp_path, monkeypatch, reader
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    found = losses(READERS[reader](project, overtaken, tmp_path))
    assert {step: loss for step, loss in found.items() if step <= 6} == losses(whole)


def test_a_machine_that_comes_back_after_another_took_over_continues_that_one(
    project, whole, bucket, server, tmp_path, caplog
):
    """What it has saved meanwhile and never uploaded is not of the run any more."""
    server.rule = lambda method, path, count: 503 if "checkpoint-4" in path else None
    short = ["checkpoint.remote_timeout_minutes=0", "checkpoint.save_steps=2"]
    url = f"train.output_dir={bucket.url}"
    one = start("train", project.recipe, url, f"train.cache_dir={tmp_path / 'one'}", *short)
    one.communicate(timeout=120)
    assert one.returncode == 2
    assert bucket.committed() == [2, 6]  # the last one is stored first
    for key in [key for key in bucket.names() if key.startswith("checkpoint-6/")]:
        bucket.delete(key)
    server.is_well()
    train(project, bucket.url, tmp_path / "two", checkpoint__save_steps=2, train__max_steps=4)
    assert "checkpoint-4.launch-2/manifest.json" in bucket.names()
    with pytest.raises(CheckpointError, match="has another checkpoint-4, as another launch"):
        STORES.fetch(Address(f"{bucket.url}/checkpoint-4"), tmp_path / "one")
    caplog.set_level("INFO")
    folder = train(project, bucket.url, tmp_path / "one", checkpoint__save_steps=2)
    assert "checkpoint-6 failed verification (another launch has taken over s3://" in caplog.text
    assert "resuming from checkpoint-4" in caplog.text
    assert_is(folder, whole)
    assert bucket.committed() == [2, 4, 6]
    assert "checkpoint-6.launch-3/manifest.json" in bucket.names()


def test_a_folder_of_a_later_launch_is_a_checkpoint_by_either_name(project, bucket, tmp_path):
    train(project, bucket.url, tmp_path / "one", train__max_steps=2)
    train(project, bucket.url, tmp_path / "two", train__max_steps=4)
    for name in ("checkpoint-4", "checkpoint-4.launch-2"):
        asked = f"{bucket.url}/{name}"
        assert CliRunner().invoke(main, ["ckpt", "verify", asked]).exit_code == 0
        folder = train(project, tmp_path / name, checkpoint__resume=asked)
        assert max(losses(folder)) == 6
    asked = f"{bucket.url}/checkpoint-4.launch-2"
    train(project, bucket.url, tmp_path / "three", checkpoint__resume=asked, train__max_steps=5)
    assert bucket.committed()[-1] == 5


def test_a_local_checkpoint_without_its_manifest_comes_from_the_store(
    project, whole, bucket, tmp_path, caplog
):
    folder = train(project, bucket.url, tmp_path / "one", train__max_steps=4)
    (folder / "checkpoint-4" / "manifest.json").unlink()
    caplog.set_level("INFO")
    assert_is(train(project, bucket.url, tmp_path / "one"), whole)
    assert "downloading checkpoint-4 " in caplog.text
    assert "resuming from checkpoint-4" in caplog.text


@pytest.mark.parametrize("fault", ["deaf", *PROOF])
def test_a_claim_whose_answer_is_lost_is_made_once(project, bucket, server, tmp_path, fault):
    """The store has done it and says nothing, or says no and has not done it."""
    failed = []

    def rule(method, path, count):
        if method == "PUT" and ".launches/" in path and not failed:
            failed.append(path)
            return fault
        return None

    server.rule = rule
    train(project, bucket.url, tmp_path, train__max_steps=2)
    assert failed
    server.is_well()
    assert [name for name in bucket.names() if "launches/" in name] == [".launches/00001.json"]
    assert bucket.committed() == [2]


def test_a_claim_that_is_none_is_named(project, bucket, tmp_path):
    train(project, bucket.url, tmp_path / "one", train__max_steps=2)
    bucket.put(".launches/00002.json", b'{"history": "x"}')
    why = r"\.launches/00002\.json: history: expected pairs"
    for cache in ("one", "two"):
        with pytest.raises(CheckpointError, match=why):
            train(project, bucket.url, tmp_path / cache)


@pytest.mark.proof
def test_a_run_that_is_killed_on_changing_machines_is_the_same_to_the_bit(
    project, bucket, server, tmp_path
):
    """At random moments; the next machine may begin while the last one still uploads."""
    whole = train(project, tmp_path / "whole", train__max_steps=150)
    draw = random.Random(7)
    server.rule = lambda method, path, count: time.sleep(draw.random() / 20)
    given = [f"train.output_dir={bucket.url}", "checkpoint.save_steps=3", "train.max_steps=150"]

    def last_step(cache):
        return max((s for p in cache.glob("*/metrics.jsonl") for s in losses(p.parent)), default=0)

    kills = 0
    while kills < 40:
        cache = tmp_path / draw.choice(["one", "two", "three"])
        process = start("train", project.recipe, *given, f"train.cache_dir={cache}")
        until = draw.randrange(5, 40) + max(last_step(path) for path in tmp_path.iterdir())
        while process.poll() is None and last_step(cache) < until:
            time.sleep(0.02)
        if process.poll() is not None:
            break
        process.kill()
        process.communicate()
        kills += 1
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert kills > 2
    assert len([name for name in bucket.names() if "launches/" in name]) > 1
    server.is_well()
    last = train(project, bucket.url, tmp_path / "four", train__max_steps=150)
    assert_is(last, whole)


def test_a_run_that_starts_again_on_its_machine_is_the_same_launch(project, bucket, tmp_path):
    for steps in (2, 4, 6):
        train(project, bucket.url, tmp_path, checkpoint__save_steps=2, train__max_steps=steps)
    assert [name for name in bucket.names() if "launches/" in name] == [".launches/00001.json"]
    assert not [name for name in bucket.names() if ".launch-" in name]


def test_another_run_and_one_without_a_sound_checkpoint_are_refused(project, bucket, tmp_path):
    train(project, bucket.url, tmp_path / "one", train__max_steps=3)
    with pytest.raises(
        RunError, match=rf"{bucket.url} .* contains a run with other settings .*data.shuffle"
    ):
        train(project, bucket.url, tmp_path / "two", data__shuffle=False)
    with pytest.raises(RunError, match=r"checkpoint.resume is none"):
        train(project, bucket.url, tmp_path / "three", checkpoint__resume="none")
    bucket.put("checkpoint-3/manifest.json", b"{}")
    for _ in range(2):  # and the next launch again
        with pytest.raises(
            CheckpointError, match=r"no valid checkpoint .*checkpoint-3/manifest\.json"
        ):
            train(project, bucket.url, tmp_path / "four")


def test_another_run_is_gone_on_from_by_its_url(project, whole, bucket, tmp_path):
    train(project, bucket.url, tmp_path / "one", train__max_steps=4)
    other = tmp_path / "other"
    asked = f"{bucket.url}/checkpoint-4"
    folder = train(project, other, tmp_path / "two", checkpoint__resume=asked)
    assert folder == other
    assert_is(folder, whole)  # the log came with the checkpoint
    with pytest.raises(RunError, match="contains later checkpoints than checkpoint-3"):
        train(project, bucket.url, checkpoint__resume=f"{bucket.url}/checkpoint-3")
    with pytest.raises(CheckpointError, match=r"checkpoint-7 was never committed"):
        train(project, tmp_path / "none", checkpoint__resume=f"{bucket.url}/checkpoint-7")


@pytest.mark.proof
def test_an_adapter_opens_from_its_url(bucket, tmp_path):
    project = made(tmp_path / "p", method={"lora": {"rank": 4}}, train={"max_steps": 2})
    folder = train(project, bucket.url, tmp_path / "one")
    located = locate(bucket.url)
    assert located.is_adapter
    assert located.folder.parent != folder, "it was downloaded"
    assert_same(weights(located.folder), weights(checkpoints(folder)[-1]))
    assert locate(f"{bucket.url}/checkpoint-2").folder == located.folder


@pytest.mark.proof
def test_every_third_request_fails_and_the_run_is_there(project, whole, bucket, server, tmp_path):
    faults = ["drop", 503, "deaf", 500]
    server.rule = lambda method, path, n: faults[n // 3 % 4] if n % 3 == 0 else None
    folder = train(project, bucket.url, tmp_path / "one")
    assert bucket.committed() == [3, 6]
    assert_is(folder, whole)
    assert_is(train(project, bucket.url, tmp_path / "two"), whole)


@pytest.mark.parametrize("fault", ["deaf", *PROOF])
def test_the_put_of_the_manifest_fails_and_is_done_again(project, bucket, server, tmp_path, fault):
    seen = []

    def rule(method, path, count):
        if method == "PUT" and "manifest.json" in path:
            seen.append(path)
            return fault if len(seen) % 2 else None
        return None

    server.rule = rule
    train(project, bucket.url, tmp_path, train__max_steps=2)
    assert bucket.committed() == [2]
    assert len(seen) > 1


@pytest.mark.proof
def test_a_store_that_stays_away_is_an_error_and_the_same_command_uploads_the_rest(
    project, whole, bucket, server, tmp_path
):
    is_last = lambda method, path: method == "PUT" and "checkpoint-6" in path  # noqa: E731
    server.rule = lambda method, path, _: 503 if is_last(method, path) else None
    arguments = [f"train.output_dir={bucket.url}", "checkpoint.remote_timeout_minutes=0"]
    said = commands.refused("train", project.recipe, *arguments)
    assert "not everything could be uploaded" in said
    assert "start the same command again" in said
    assert 6 not in bucket.committed()
    server.is_well()
    folder = train(project, bucket.url)
    assert 6 in bucket.committed()
    assert_is(folder, whole)


@pytest.mark.parametrize(
    "at",
    [
        pytest.param("rank_00000/model.safetensors", marks=pytest.mark.proof),
        "manifest.json",  # all else is there
    ],
)
def test_a_run_killed_in_the_middle_of_an_upload_goes_on_on_another_machine(
    project, whole, bucket, server, tmp_path, at
):
    folder = load(project.recipe, [f"train.output_dir={bucket.url}"]).train.folder
    held = []

    def rule(method, path, count):
        if method == "PUT" and f"checkpoint-6/{at}" in path:
            held.append(path)
            time.sleep(0.5 if len(held) == 1 else 0)  # the process is killed in here
            return "drop"
        return None

    server.rule = rule
    killed(project, bucket.url, "checkpoint.remote_timeout_minutes=0", when=lambda: held)
    wait_until(lambda: is_idle(folder))
    assert bucket.committed() == [3]
    server.is_well()
    folder = train(project, bucket.url, tmp_path / "another")
    assert 6 in bucket.committed()
    assert_is(folder, whole)


def test_an_upload_goes_on_when_the_trainer_is_killed(project, bucket, server, tmp_path):
    begun = []

    def rule(method, path, count):
        if method == "PUT" and "checkpoint-3/" in path:
            begun.append(path)
            time.sleep(0.1)

    server.rule = rule
    killed(project, bucket.url, when=lambda: begun)
    wait_until(bucket.committed)
    assert bucket.committed() == [3]


@pytest.mark.proof
def test_sigterm_does_not_cut_the_last_upload_short(project, bucket, server, tmp_path):
    begun = []

    def rule(method, path, count):
        if method == "PUT" and "checkpoint-2/" in path:
            begun.append(path)
            time.sleep(0.1)

    server.rule = rule
    url = f"train.output_dir={bucket.url}"
    process = start("train", project.recipe, url, "train.max_steps=2")
    wait_until(lambda: begun)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert bucket.committed() == [2]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s4://bucket/run", r"unknown scheme 's4' \(did you mean s3\?\)"),
        ("s3://there-is-none/run", "this bucket does not exist"),
        ("s3://", "neither a path nor a complete URL"),
        ("s3:/bucket/run", "neither a path nor a complete URL"),
    ],
)
def test_a_wrong_url_is_said(project, bucket, tmp_path, url, why):
    with pytest.raises(SurefootError, match=why):
        train(project, url, tmp_path)


def test_missing_credentials_are_said(project, bucket, tmp_path, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(SurefootError, match=r"no credentials.*AWS_ACCESS_KEY_ID"):
        train(project, bucket.url, tmp_path)


@pytest.mark.skipif(find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_a_missing_package_is_said(project, tmp_path):
    with pytest.raises(SurefootError, match=r"pip install -e '.\[gs\]'"):
        train(project, "gs://bucket/run", tmp_path)


def test_a_run_in_a_store_is_replayed_and_forked(project, whole, bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    folder = train(project, bucket.url, tmp_path / "cache")
    shutil.rmtree(folder)
    done = CliRunner().invoke(main, ["replay", bucket.url, "--step", "4", "--to", "6"])
    assert done.exit_code == 0, done.output
    assert "replayed from checkpoint-3: steps 4 to 6" in done.output
    assert "3 logged lines: equal to the bit" in done.output
    assert "tensors: equal to the bit" in done.output
    new = tmp_path / "new"
    done = CliRunner().invoke(main, ["fork", bucket.url, str(new), "--step", "5"])
    assert done.exit_code == 0, done.output
    assert f"{new}: continues {bucket.url} after step 5" in done.output
    train(SimpleNamespace(recipe=new))
    assert_same(weights(new / "checkpoint-6"), weights(whole / "checkpoint-6"))
