"""Completion in shells, and manual pages."""

import re
import shutil
import subprocess

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from surefoot.cli.completion import VARIABLE
from surefoot.cli.main import COMMANDS, main
from surefoot.cli.man import pages


def completed(*words, last=""):
    found = ShellComplete(main, {}, "surefoot", VARIABLE)
    return [item.value for item in found.get_completions(list(words), last)]


def test_commands_options_and_inner_commands_are_completed():
    assert completed(last="pre") == ["preview", "predict"]
    assert completed("export", last="--qu") == ["--quantize"]
    assert completed("export", "--to", last="gg") == ["gguf", "gguf-adapter"]
    assert completed("ckpt", last="ver") == ["verify"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_calls_the_program(shell, tmp_path):
    text = CliRunner().invoke(main, ["completion", shell]).output
    assert f"{VARIABLE}={shell}_complete" in text
    if program := shutil.which(shell):
        (tmp_path / "script").write_text(text)
        subprocess.run([program, "-n", str(tmp_path / "script")], check=True)


def test_there_is_a_manual_page_of_every_command(tmp_path):
    result = CliRunner().invoke(main, ["man", str(tmp_path)])
    assert result.exit_code == 0, result.output
    names = {path.name for path in tmp_path.iterdir()}
    assert {f"surefoot-{name}.1" for name in COMMANDS} | {"surefoot.1"} <= names
    assert "surefoot-ckpt-verify.1" in names
    text = (tmp_path / "surefoot-export.1").read_text()
    assert "\\fB\\-\\-quantize" in text
    assert all(".SH NAME" in page for _, page in pages(main))


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_reads_the_pages_without_a_warning(tmp_path):
    for name, text in list(pages(main))[:5]:
        command = ["groff", "-man", "-ww", "-Tutf8", "-K", "utf8"]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        assert not done.stderr, (name, done.stderr)
        assert "DESCRIPTION" in re.sub(".\b", "", done.stdout)
