"""A checkpoint that verifies is what was saved; one that is not is named, and passed over."""

import errno
import json
import logging
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import save_file

from crash.system import But, refusing
from damage import flip
from surefoot.checkpoint import CheckpointError, load, recover_latest, save
from surefoot.checkpoint import verification as latest
from surefoot.checkpoint.disk.commit import temporary_folder
from surefoot.checkpoint.looking.listing import list_run
from surefoot.checkpoint.verification import find_latest, verify
from surefoot.storage import files

from .sample import blank, same, sample_states


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path, 7, sample_states(), companions={"config.json": b"{}", "sub/x": b"y"})


@pytest.mark.parametrize("full", [True, False])
def test_a_fresh_checkpoint_is_whole(folder, full):
    report = verify(folder, full=full)
    assert report.ok and report.notes == []
    assert report.checked == (
        "every byte checked" if full else "lengths, headers and small files checked"
    )


def test_damage_in_a_tensor_is_found_by_the_full_check_only(folder):
    flip(folder / "model.safetensors")
    assert verify(folder, full=False).ok
    (problem,) = verify(folder, full=True).problems
    assert "model.safetensors" in problem and "resume from an earlier checkpoint" in problem


@pytest.mark.parametrize(
    "name", ["config.json", "sub/x", "state.json", "model.safetensors", "manifest.json"]
)
def test_damage_in_a_header_or_small_file_is_found_by_the_quick_check(folder, name):
    flip(folder / name, 0)
    report = verify(folder, full=False)
    assert not report.ok
    assert name in report.problems[0]


def test_every_problem_is_told_at_once(folder):
    flip(folder / "config.json")
    flip(folder / "model.safetensors")
    (folder / "state.safetensors").unlink()
    assert len(verify(folder, full=True).problems) == 3


def test_strange_files_are_noted_but_no_problem(folder):
    (folder / "README.md").write_text("mine")
    report = verify(folder, full=True)
    assert report.ok
    assert report.notes == [f"{folder / 'README.md'}: was not saved with this checkpoint"]


def test_progress_is_told_in_bytes(folder):
    told = []
    verify(folder, full=True, progress=told.append)
    raw = json.loads((folder / "manifest.json").read_text())
    assert len(told) == len(raw["pieces"])
    assert 0 < sum(told) < sum(raw["files"].values())


def test_what_is_not_there_is_an_error_not_a_report(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        verify(tmp_path / "none", full=True)
    with pytest.raises(CheckpointError, match="contains no weights"):
        verify(tmp_path, full=True)


def test_a_checkpoint_that_was_never_committed_is_a_report(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    assert "never committed" in verify(tmp_path / "checkpoint-3", full=True).problems[0]


def test_a_file_that_cannot_be_read_is_a_problem(folder, monkeypatch):
    monkeypatch.setattr(files, "os", But(preadv=refusing(errno.EIO)))
    assert "input/output error" in verify(folder, full=True).problems[0]


def test_plain_folders_are_checked_for_structure(shared, tmp_path):
    source = shared / "models" / "stories260k"
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    report = verify(tmp_path, full=True)
    assert report.ok and report.checked == "structure checked"
    assert "no hashes" in report.notes[0]
    (tmp_path / "config.json").write_text('{"a": 1, "a": 2}')
    assert "occurs twice" in verify(tmp_path, full=True).problems[0]
    data = (source / "model.safetensors").read_bytes()
    for broken in (data[:-1], data[:1000], b"", data + b"x", b"\xff" * 8 + data[8:]):
        (tmp_path / "model.safetensors").write_bytes(broken)
        assert "model.safetensors" in verify(tmp_path, full=False).problems[0]


def test_the_newest_whole_checkpoint_is_found(tmp_path):
    assert find_latest(tmp_path).path is None
    assert find_latest(tmp_path / "none").path is None
    folders = [save(tmp_path, step, sample_states()) for step in (5, 10, 100)]
    found = find_latest(tmp_path)
    assert found.path == folders[-1] and found.passed_over == []


def test_damaged_ones_are_passed_over_with_the_reason(tmp_path):
    five, ten, hundred = (save(tmp_path, step, sample_states()) for step in (5, 10, 100))
    flip(hundred / "model.safetensors")
    (ten / "state.json").unlink()
    (tmp_path / "checkpoint-200").mkdir()
    (tmp_path / ".checkpoint-300.00.part").mkdir()
    found = find_latest(tmp_path)
    assert found.path == five
    assert [p.name for p, _ in found.passed_over] == [
        "checkpoint-200",
        "checkpoint-100",
        "checkpoint-10",
    ]
    reasons = [reason for _, reason in found.passed_over]
    assert (
        "never committed" in reasons[0]
        and "has changed since it was saved" in reasons[1]
        and "does not exist" in reasons[2]
    )


def test_none_is_found_if_none_is_whole(tmp_path):
    flip(save(tmp_path, 5, sample_states()) / "manifest.json", 30)
    found = find_latest(tmp_path)
    assert found.path is None and len(found.passed_over) == 1


def test_a_checkpoint_of_others_is_not_gone_on_from(tmp_path, shared):
    """The Hugging Face Trainer uses the same names, but such a folder may be half written."""
    source = shared / "models" / "stories260k"
    target = tmp_path / "checkpoint-5"
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    assert verify(target, full=True).ok
    assert find_latest(tmp_path).path is None


@pytest.fixture
def root(tmp_path):
    for step in (2, 4):
        save(tmp_path, step, sample_states(seed=step))
    return tmp_path


def test_nothing_there_means_to_start_anew(tmp_path):
    assert recover_latest(tmp_path / "not yet there") is None
    assert recover_latest(tmp_path) is None


def test_it_is_the_newest(root):
    assert recover_latest(str(root)) == root / "checkpoint-4"


def test_a_damaged_one_is_named_kept_aside_and_passed_over(root, caplog):
    flip(root / "checkpoint-4" / "model.safetensors")
    found = recover_latest(root)
    assert found == root / "checkpoint-2"
    assert "checkpoint-4 failed verification" in caplog.text
    assert (root / "checkpoint-4.damaged").is_dir()
    states = blank(sample_states())
    load(found, states)
    assert same(states["model"].state, sample_states(seed=2)["model"].state)
    save(root, 4, sample_states(seed=4))
    assert recover_latest(root) == root / "checkpoint-4"


def test_damaged_checkpoints_alone_are_an_error_and_stay_as_they_are(root):
    for step in (2, 4):
        flip(root / f"checkpoint-{step}" / "model.safetensors")
    with pytest.raises(CheckpointError, match="no valid checkpoint to resume from") as raised:
        recover_latest(root)
    for step in (2, 4):
        assert f"checkpoint-{step}: {root}/checkpoint-{step}/model.safetensors" in str(raised.value)
        assert (root / f"checkpoint-{step}").is_dir()


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(root, caplog):
    (root / "checkpoint-4").rename(root / "checkpoint-9")
    report = verify(root / "checkpoint-9")
    assert "that of step 4" in report.problems[0]
    assert "checkpoint-4 again" in report.problems[0]
    assert "that of step 4" in str(list_run(root)[-1].problem)
    with pytest.raises(CheckpointError, match="that of step 4"):
        load(root / "checkpoint-9", blank(sample_states()))
    assert recover_latest(root) == root / "checkpoint-2"
    (root / "checkpoint-9.damaged").rename(root / "checkpoint-4")
    assert recover_latest(root) == root / "checkpoint-4"


def foreign(folder):
    folder.mkdir(parents=True)
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def test_somebody_elses_checkpoint_is_kept_out_of_the_way(root):
    older, newer = foreign(root / "checkpoint-3"), foreign(root / "checkpoint-6")
    assert recover_latest(root) == root / "checkpoint-4"
    assert older.exists()
    assert not newer.exists()
    assert (root / "checkpoint-6.damaged" / "model.safetensors").exists()


def test_only_somebody_elses_checkpoints_are_no_place_to_start(tmp_path):
    other = foreign(tmp_path / "checkpoint-6")
    with pytest.raises(CheckpointError, match="checkpoint-6: not a Surefoot checkpoint"):
        recover_latest(tmp_path)
    assert (other / "model.safetensors").exists()


def test_a_folder_that_is_nothing_is_out_of_the_way(root):
    (root / "checkpoint-6").mkdir()
    assert recover_latest(root) == root / "checkpoint-4"
    assert (root / "checkpoint-6.damaged").is_dir()


def test_what_a_killed_save_left_is_removed(root, caplog):
    caplog.set_level(logging.INFO)
    part = root / ".checkpoint-6.0123abcd.part"
    part.mkdir()
    (part / "manifest.json").touch()
    assert recover_latest(root) == root / "checkpoint-4"
    assert not part.exists()
    assert "removed" in caplog.text


def test_a_save_that_outlived_its_run_is_waited_for(root, caplog):
    caplog.set_level(logging.INFO)
    told = threading.Event()

    def finish():
        told.wait(10)
        time.sleep(0.2)
        writing.__exit__(None, None, None)

    writing = temporary_folder(root / "checkpoint-6")
    writing.__enter__()
    thread = threading.Thread(target=finish)
    thread.start()
    told.set()
    assert recover_latest(root) == root / "checkpoint-4"
    thread.join()
    assert "waiting for its writer process" in caplog.text


def test_a_writer_that_hangs_is_named_and_not_waited_for_without_end(root, monkeypatch):
    monkeypatch.setattr(latest, "_PATIENCE", 0.3)
    code = (
        "import sys, time; from pathlib import Path\n"
        "from surefoot.checkpoint.disk.commit import temporary_folder\n"
        "with temporary_folder(Path(sys.argv[1]) / 'checkpoint-6'):\n"
        "    print(flush=True); time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout.readline()
            writer.send_signal(signal.SIGSTOP)
            with pytest.raises(CheckpointError, match=r"\.checkpoint-6\..*\.part") as raised:
                recover_latest(root)
        finally:
            writer.kill()
    assert f"process {writer.pid}, which is stopped," in str(raised.value)
    assert f"kill -KILL {writer.pid}" in str(raised.value)
    assert recover_latest(root) == root / "checkpoint-4"  # the cure
