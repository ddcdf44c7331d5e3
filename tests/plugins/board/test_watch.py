import contextlib
import fcntl
import json
import math
import os
import pty
import re
import subprocess
import sys
import time

import pytest

import commands
from surefoot.plugins.board.command import sparkline

from .runs import COMPLETE, write_run


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "one", end=COMPLETE)
    write_run(root / "two", offset=1.0)
    for step in (10, 20):
        folder = root / "one" / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "manifest.json").write_text("{}")
    return root


def watch(*words, **environment):
    return commands.ok("watch", *words, env=environment)


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([0.0, 1.0, 2.0, 3.0], "▁▃▆█"),
        ([0.0, None, 2.0, 3.0], "▁▁▆█"),  # not finite: as the one before
        ([1e308, 0.0, 0.0, -1e308], "█▅▅▁"),
        ([3.0] * 4, "▅▅▅▅"),
        ([0.0] * 500 + [7.0] + [0.0] * 499, "▁▁█▁"),  # no spike is lost
    ],
)
def test_a_curve_is_drawn_as_far_as_it_can_be(values, drawn):
    assert sparkline(values, 4, "▁▂▃▄▅▆▇█") == drawn


def test_one_run_is_shown_with_its_figures_and_its_curves(root):
    text = watch(root / "one", COLUMNS="100", LINES="40")
    head, facts, loss, evaluated, *_ = text.splitlines()
    assert head == "one  complete (It has ended.)"
    assert facts == "step 20/20 (100 %)  checkpoints 10, 20"
    assert re.match(rf"loss +█.*▁  {2 / math.sqrt(20):.4g}  0.4472 to 2, steps 1 to 20", loss)
    assert evaluated.split()[2] == "0.5"
    assert max(map(len, text.splitlines())) <= 100


def test_a_narrow_terminal_and_one_without_unicode_are_enough(root):
    words = [sys.executable, "-m", "surefoot", "watch", str(root / "one"), "--once"]
    narrow = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "40"}
    text = subprocess.run(words, env=narrow, check=True, capture_output=True, text=True).stdout
    assert text.isascii() and "loss               #" in text
    assert max(map(len, text.splitlines())) <= 40
    watch(root, COLUMNS="1")


def test_several_runs_are_below_each_other(root):
    one, _, first, two, _, second = watch(root, "--metric", "loss", COLUMNS="100").splitlines()
    assert (one.split()[:2], two.split()[:2]) == (["one", "complete"], ["two", "died"])
    assert first.rstrip().endswith("0.4472 to 2, steps 1 to 20")
    assert second.rstrip().endswith("1.447 to 3, steps 1 to 20")


def test_what_is_no_run_is_an_error(root, tmp_path):
    for place, says in ((tmp_path, "there is no run in it"), (root / "x", "no such folder")):
        assert says in commands.refused("watch", place)


def test_broken_lines_and_escape_sequences_are_shown_as_what_they_are(tmp_path):
    run = write_run(tmp_path / "odd\x1b[2J", end={"outcome": "failed", "error": "no\x1b]0;title"})
    with (run / "metrics.jsonl").open("a") as file:
        file.write("not a record\n" + json.dumps({"step": 21, "loss": None}) + "\n")
    text = watch(run, COLUMNS="120")
    assert "\x1b" not in text
    assert "failed (no\\u001b]0;title)" in text
    assert "1 line is not a record and skipped" in text
    assert "(1 not finite)" in text


def test_a_live_screen_follows_the_run_and_ends_with_it(tmp_path):
    run = write_run(tmp_path / "live", steps=5)
    lock = (run / ".lock").open()
    fcntl.flock(lock, fcntl.LOCK_EX)
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "surefoot", "watch", str(run), "--every", "0.1"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "90", "LINES": "30"}
    child = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = until(ours, "running")
    row = {"step": 6, "loss": 0.1234, "grad_norm": 1.0}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    seen += until(ours, "0.1234")
    lock.close()
    seen += until(ours, "died")
    with contextlib.suppress(OSError):  # the end: a terminal that nobody reads holds its writer up
        while os.read(ours, 1 << 16):
            pass
    assert child.wait(timeout=60) == 0, seen
    os.close(ours)


def until(terminal, word):
    seen, end = "", time.monotonic() + 60
    while word not in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen) and time.monotonic() < end:
        try:
            seen += os.read(terminal, 1 << 16).decode(errors="replace")
        except OSError:
            break
    assert word in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen), seen
    return seen
