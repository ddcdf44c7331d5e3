"""A checkpoint that verifies is what was saved; one that is not is named, and passed over."""

import json
import os

import pytest

from surefoot.checkpoint.saving.preparation import save
from surefoot.checkpoint.verification import find_latest, verify
from surefoot.errors import CheckpointError

from ..sample import sample_states


@pytest.fixture
def folder(tmp_path):
    return save(
        tmp_path, 7, sample_states(), kind="full", companions={"config.json": b"{}", "sub/x": b"y"}
    )


def flip(path, index=-1):
    data = bytearray(path.read_bytes())
    data[index] ^= 1
    path.write_bytes(data)


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
    from surefoot.storage import files

    class Failing:
        def __getattr__(self, name):
            return getattr(os, name)

        def preadv(self, descriptor, views, offset):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(files, "os", Failing())
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
    folders = [save(tmp_path, step, sample_states(), kind="full") for step in (5, 10, 100)]
    found = find_latest(tmp_path)
    assert found.path == folders[-1] and found.passed_over == []


def test_damaged_ones_are_passed_over_with_the_reason(tmp_path):
    five, ten, hundred = (
        save(tmp_path, step, sample_states(), kind="full") for step in (5, 10, 100)
    )
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
    flip(save(tmp_path, 5, sample_states(), kind="full") / "manifest.json", 30)
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
