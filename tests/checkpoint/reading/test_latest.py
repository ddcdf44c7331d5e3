"""Where a run goes on from, after all that may have happened to the one before."""

import logging
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import save_file

from surefoot.checkpoint import CheckpointError, load, recover_latest, save
from surefoot.checkpoint import verification as latest
from surefoot.checkpoint.disk.commit import temporary_folder
from surefoot.checkpoint.looking.listing import list_run
from surefoot.checkpoint.verification import verify

from ..sample import blank, same, sample_states


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
    file = root / "checkpoint-4" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    found = recover_latest(root)
    assert found == root / "checkpoint-2"
    assert "checkpoint-4 failed verification" in caplog.text
    assert (root / "checkpoint-4.damaged").is_dir()
    states = blank(sample_states())
    load(found, states)
    assert same(states["model"].state, sample_states(seed=2)["model"].state)
    save(root, 4, sample_states(seed=4))
    assert recover_latest(root) == root / "checkpoint-4"


def damage(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_damaged_checkpoints_alone_are_an_error_and_stay_as_they_are(root):
    for step in (2, 4):
        damage(root / f"checkpoint-{step}")
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
