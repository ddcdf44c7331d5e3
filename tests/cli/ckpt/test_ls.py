"""``ckpt ls``: a line a checkpoint, for people and tools, at once."""

import json
import os
import subprocess
import sys

from surefoot.checkpoint.disk.commit import temporary_folder

from .runner import damage, ok, on_screen, refused, run


def test_ls_shows_a_line_a_checkpoint(folder):
    (folder.parent / "checkpoint-2000").mkdir()
    (folder.parent / ".checkpoint-3.0a.part").mkdir()
    shown = ok("ls", folder.parent)
    lines = shown.splitlines()
    head = "checkpoint step saved size kind loss eval loss parent state"
    assert lines[0].split() == head.split()
    assert lines[1].split()[:2] == ["checkpoint-5", "5"]
    assert lines[1].split()[-3:] == ["0.5", "0.5", "best"]
    assert lines[2].split()[1] == "1,000"
    assert lines[2].split()[-4:] == ["0.0025", "100", "5", "latest"]
    assert lines[3].split() == ["checkpoint-2000", "2,000", "damaged"]
    assert lines[4].split() == [".checkpoint-3.0a.part", "leftover"]
    assert "✗ checkpoint-2000: this checkpoint was never committed" in shown


def test_ls_shows_a_save_in_progress(tmp_path):
    with temporary_folder(tmp_path / "checkpoint-5"):
        assert "being saved" in run("ls", tmp_path).output


def test_ls_as_json(folder):
    rows = json.loads(run("ls", folder.parent, "--json").output)
    assert [row["step"] for row in rows] == [5, 1000]
    assert rows[0]["is_best"] and rows[1]["loss"] == 0.0025 and rows[0]["problem"] is None
    assert rows[0]["path"] == str(folder.parent / "checkpoint-5")


def test_ls_of_nothing(tmp_path):
    assert run("ls", tmp_path).output == f"{tmp_path}: no checkpoints\n"
    assert json.loads(run("ls", tmp_path, "--json").output) == []


def test_ls_of_a_folder_that_is_not_there_is_a_users_mistake(tmp_path):
    assert "does not exist" in refused("ls", tmp_path / "none")


def test_ls_needs_no_torch(folder):
    code = "import sys; from surefoot.cli.main import main; "
    code += "main(['ckpt', 'ls', sys.argv[1]], standalone_mode=False); "
    code += "assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys()"
    subprocess.run(
        [sys.executable, "-c", code, str(folder.parent)], check=True, capture_output=True
    )


def test_ls_lists_the_trainers_checkpoints_too(theirs):
    broken = theirs.with_name("checkpoint-40")
    broken.mkdir()
    (broken / "trainer_state.json").write_text("{}")
    (broken / "pytorch_model.bin").write_bytes(b"x")
    result = run("ls", theirs.parent)
    head, line, *_ = result.output.splitlines()
    assert head.split() == [
        "checkpoint",
        "step",
        "saved",
        "size",
        "kind",
        "layout",
        "loss",
        "eval",
        "loss",
        "state",
    ]
    assert line.split()[0] == "checkpoint-30"
    assert line.split()[-6:] == ["full", "Trainer", "1.25", "0.5", "latest,", "best"]
    assert "✗ checkpoint-40: " in result.output and "pickled file can run code" in result.output
    row = json.loads(run("ls", theirs.parent, "--json").output)[0]
    assert (row["step"], row["layout"], row["verified"]) == (30, "huggingface", None)


def test_ls_verify_says_what_is_whole_and_fails_if_one_is_not(folder, theirs):
    assert ok("ls", folder.parent, "--verify").count("verified") == 2
    damage(folder)
    assert run("ls", folder.parent).exit_code == 0
    shown = ok("ls", folder.parent, "--verify", code=1)
    assert shown.count("verified") == 1
    assert "✗ checkpoint-1000: model.safetensors: " in shown
    assert "no hashes" in run("ls", theirs.parent, "--verify").output
    (folder / "state.json").unlink()
    rows = json.loads(run("ls", folder.parent, "--verify", "--json").output)
    assert [row["verified"] for row in rows] == ["every byte", None]


def test_ls_shows_what_shared_files_really_take(folder):
    assert "on disk" not in run("ls", folder.parent).output
    old = folder.with_name("checkpoint-5")
    (folder / "model.safetensors").unlink()
    os.link(old / "model.safetensors", folder / "model.safetensors")
    rows = json.loads(run("ls", folder.parent, "--json").output)
    shared = (old / "model.safetensors").stat().st_blocks * 512
    own = [sum(p.stat().st_blocks * 512 for p in f.iterdir()) for f in (old, folder)]
    assert [row["disk_bytes"] for row in rows] == [own[0], own[1] - shared]


def test_ls_leaves_columns_out_where_there_is_no_room(folder, monkeypatch):
    for columns, is_there in (("160", True), ("78", False)):
        head = on_screen(monkeypatch, columns, "ls", folder.parent)[0]
        assert ("parent" in head) == is_there and "eval loss" in head


def test_text_from_a_file_cannot_reach_the_terminal(theirs):
    name = "[red]\x1b[2Jx"
    evil = theirs.with_name("checkpoint-50")
    evil.mkdir()
    header = json.dumps({name: {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (evil / "model.safetensors").write_bytes(data)
    for arguments in (
        ("ls", evil.parent),
        ("show", evil, "--tensors"),
        ("show", evil, "--norms"),
        ("diff", evil, theirs),
    ):
        result = run(*arguments)
        assert "\x1b" not in result.output and result.exit_code in (0, 1, 2), arguments
        assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "[red]" in run("show", evil, "--tensors").output
