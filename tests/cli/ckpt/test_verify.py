"""``ckpt verify``: exit codes for scripts."""

import json

from .runner import damage, ok, run


def test_verify_of_a_whole_checkpoint(folder):
    for option, words in (
        ("--full", "every byte checked"),
        ("--quick", "lengths, headers and small files checked"),
    ):
        assert f"✓ {folder}: verified ({words}" in ok("verify", folder, option)
    assert "every byte checked" in run("verify", folder).output


def test_verify_of_a_damaged_one_fails(folder):
    damage(folder)
    shown = ok("verify", folder, code=1)
    assert "✗" in shown and "has changed since it was saved" in shown
    assert run("verify", folder, "--quick").exit_code == 0


def test_verify_as_json(folder):
    (folder / "notes.txt").write_text("x")
    found = json.loads(run("verify", folder, "--json").output)
    assert found["ok"] and found["problems"] == [] and len(found["notes"]) == 1
    damage(folder)
    assert not json.loads(ok("verify", folder, "--json", code=1))["ok"]


def test_verify_of_what_is_no_checkpoint_is_a_users_mistake(tmp_path):
    assert run("verify", tmp_path).exit_code == 2
    assert run("verify", tmp_path / "none").exit_code == 2


def test_verify_of_a_model_of_others_says_what_was_checked(shared):
    shown = ok("verify", shared / "models" / "stories260k")
    assert "structure checked" in shown
    assert "no hashes" in shown


def test_verify_prints_no_empty_line(folder):
    for arguments in ((folder,), (folder, "--quick")):
        result = run("verify", *arguments)
        assert result.stdout.startswith("✓") and result.stderr == ""
