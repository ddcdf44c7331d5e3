"""Completion in shells, by click's own scripts, though commands are imported late."""

import os
import shutil
import subprocess
import sys

import pytest
from click.shell_completion import ShellComplete

from surefoot.cli.main import main

VARIABLE = "_SUREFOOT_COMPLETE"


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
    code = "import sys; from surefoot.cli.main import main; main(prog_name='surefoot')"
    environment = {**os.environ, VARIABLE: f"{shell}_source"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert f"{VARIABLE}={shell}_complete" in done.stdout.decode()
    if program := shutil.which(shell):
        (tmp_path / "script").write_bytes(done.stdout)
        subprocess.run([program, "-n", str(tmp_path / "script")], check=True)
