"""``surefoot ckpt``: tables for people, JSON for tools, exit codes for scripts, and no torch."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner

from checkpoint.sample import sample_states
from surefoot.checkpoint.commit import aside
from surefoot.checkpoint.save import save
from surefoot.cli.ckpt import table
from surefoot.cli.main import main


def run(*args):
    return CliRunner().invoke(main, ["ckpt", *map(str, args)])


@pytest.fixture
def folder(tmp_path):
    for step in (5, 1000):
        state = {"log_history": [{"loss": 2.5 / step}], "best_global_step": 5}
        companions = {"trainer_state.json": json.dumps(state).encode()}
        found = save(tmp_path / "run", step, sample_states(), kind="full", companions=companions)
    return found


def damage(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_ls_shows_a_line_a_checkpoint(folder):
    (folder.parent / "checkpoint-2000").mkdir()
    (folder.parent / ".checkpoint-3.0a.part").mkdir()
    result = run("ls", folder.parent)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].split() == ["checkpoint", "step", "saved", "size", "kind", "loss", "state"]
    assert lines[1].split()[:2] == ["checkpoint-5", "5"] and lines[1].split()[-2:] == [
        "0.5",
        "best",
    ]
    assert lines[2].split()[1] == "1,000" and lines[2].split()[-2:] == ["0.0025", "newest"]
    assert lines[3].split() == ["checkpoint-2000", "2,000", "damaged"]
    assert lines[4].split() == [".checkpoint-3.0a.part", "leftover"]
    assert "✗ checkpoint-2000: this checkpoint was never committed" in result.output


def test_ls_shows_a_save_in_progress(tmp_path):
    with aside(tmp_path / "checkpoint-5"):
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
    result = run("ls", tmp_path / "none")
    assert result.exit_code == 2 and "does not exist" in result.output


def test_ls_needs_no_torch(folder):
    code = "import sys; from surefoot.cli.main import main; "
    code += "main(['ckpt', 'ls', sys.argv[1]], standalone_mode=False); "
    code += "assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys()"
    subprocess.run(
        [sys.executable, "-c", code, str(folder.parent)], check=True, capture_output=True
    )


def test_show_tells_what_is_in_a_checkpoint(folder):
    result = run("show", folder)
    assert result.exit_code == 0
    for words in (
        "Surefoot",
        "full weights",
        "model.safetensors",
        "optimizer",
        "epoch, index, seed",
        "BF16 (1)",
    ):
        assert words in result.output
    assert "model.norm.weight" not in run("show", folder).output.replace("model.norm.weight,", "")
    assert "model.norm.weight.exp_avg" in run("show", folder, "--tensors").output


def test_show_as_json(folder):
    found = json.loads(run("show", folder, "--json").output)
    assert found["layout"] == "native" and found["facts"]["step"] == "1000"
    assert {tensor["dtype"] for tensor in found["groups"][0]["tensors"]} == {"F32", "BF16", "BOOL"}


def test_show_of_a_model_of_others(shared):
    result = run("show", shared / "models" / "stories260k")
    assert "Hugging Face" in result.output and "260,032" in result.output


def test_show_of_what_is_no_checkpoint_is_a_users_mistake(tmp_path):
    result = run("show", tmp_path)
    assert result.exit_code == 2
    assert "error:" in result.output and "holds no weights" in result.output


def test_verify_of_a_whole_checkpoint(folder):
    for option, words in (
        ("--full", "every byte checked"),
        ("--quick", "lengths, headers and small files checked"),
    ):
        result = run("verify", folder, option)
        assert result.exit_code == 0
        assert f"✓ {folder}: whole ({words}" in result.output
    assert "every byte checked" in run("verify", folder).output


def test_verify_of_a_damaged_one_fails(folder):
    damage(folder)
    result = run("verify", folder)
    assert result.exit_code == 1
    assert "✗" in result.output and "are not those that were saved" in result.output
    assert run("verify", folder, "--quick").exit_code == 0


def test_verify_as_json(folder):
    (folder / "notes.txt").write_text("x")
    found = json.loads(run("verify", folder, "--json").output)
    assert found["ok"] and found["problems"] == [] and len(found["notes"]) == 1
    damage(folder)
    result = run("verify", folder, "--json")
    assert result.exit_code == 1 and not json.loads(result.output)["ok"]


def test_verify_of_what_is_no_checkpoint_is_a_users_mistake(tmp_path):
    assert run("verify", tmp_path).exit_code == 2
    assert run("verify", tmp_path / "none").exit_code == 2


def test_verify_of_a_model_of_others_says_what_was_checked(shared):
    result = run("verify", shared / "models" / "stories260k")
    assert (
        result.exit_code == 0
        and "structure checked" in result.output
        and "no hashes" in result.output
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, ""),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_600, "1 MB"),
        (1_234_567, "1.23 MB"),
        (5 * 10**9, "5 GB"),
        (10**19, "1e+04 PB"),
    ],
)
def test_sizes(count, text):
    assert table.in_bytes(count) == text


@pytest.mark.parametrize(
    ("ago", "words"),
    [
        (timedelta(seconds=5), " s ago)"),
        (timedelta(minutes=5), "(5 min ago)"),
        (timedelta(hours=5), "(5 h ago)"),
        (timedelta(days=5), "(5 days ago)"),
    ],
)
def test_times(ago, words):
    then = (datetime.now(UTC) - ago).isoformat(timespec="seconds").replace("+00:00", "Z")
    assert table.when(then).endswith(words)
    assert table.when("once") == "once" and table.when(None) == ""
