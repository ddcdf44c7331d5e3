"""``surefoot ckpt`` as a user types it."""

import re

import commands
from damage import flip

run, ok, refused = commands.of("ckpt")


def damage(folder, name="model.safetensors"):
    """Flip the last bit of a file."""
    flip(folder / name)


def on_screen(monkeypatch, columns, *args):
    """The lines on a terminal of that width, without the colours."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", columns)
    return re.sub(r"\x1b\[[\d;]*m", "", run(*args).stdout).splitlines()
