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
from click.testing import CliRunner

from board.runs import COMPLETE, write_run
from surefoot.cli.main import main
from surefoot.plugins.board.commands.watch import picture

BRAILLE = range(0x2800, 0x2900)


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
    done = CliRunner().invoke(main, ["watch", *map(str, words)], env=environment)
    assert done.exit_code == 0, done.output
    return done.stdout


def lit(curve, width, height):
    """The dots of a picture, as pixels from the top left."""
    found = set()
    for y, row in enumerate(picture([curve], width, height, is_plain=False)):
        for x, (character, _) in enumerate(row):
            bits = ord(character) - 0x2800 if character != " " else 0
            for bit, (dx, dy) in enumerate(
                [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)]
            ):
                if bits >> bit & 1:
                    found.add((2 * x + dx, 4 * y + dy))
    return found


def test_a_curve_is_drawn_through_its_points():
    assert lit([(0, 0.0), (1, 1.0)], 2, 1) == {(0, 3), (1, 2), (2, 1), (3, 0)}
    spike = lit([(0, 0.0), (1, 7.0), (2, 0.0)], 8, 2)
    assert {(0, 7), (8, 0), (15, 7)} <= spike
    assert {y for _, y in spike} == set(range(8))  # without a gap


def test_odd_values_are_drawn_as_far_as_they_can_be():
    assert lit([(5, 3.0)], 4, 2)
    assert lit([(1, 1e308), (3, -1e308)], 4, 2)
    plain = picture([[(1, 1.0), (2, 2.0)]], 9, 3, is_plain=True)
    assert {character for row in plain for character, _ in row} == {" ", "*"}


def test_one_run_is_shown_with_its_figures_and_its_curves(root):
    text = watch(root / "one", COLUMNS="100", LINES="40")
    head, facts, *_ = text.splitlines()
    assert head == "one  complete (it has recorded its end)"
    for part in ("step 20", "eval_loss 0.5000", "1,000 tok/s", "checkpoints 10, 20"):
        assert part in " ".join(text.split())
    assert f"loss {2 / math.sqrt(20):.4f}" in facts
    assert any(ord(character) in BRAILLE for character in text)
    assert max(map(len, text.splitlines())) <= 100


def test_a_narrow_terminal_and_one_without_unicode_are_enough(root):
    text = watch(root / "one", "--plain", COLUMNS="40", LINES="12")
    assert text.isascii() and "|" in text
    assert max(map(len, text.splitlines())) <= 40
    assert len(text.splitlines()) <= 14
    watch(root, COLUMNS="1", LINES="1")


def test_several_runs_are_lines_and_one_picture(root):
    text = watch(root, "--metric", "loss", COLUMNS="100", LINES="30")
    assert [line.split()[1:3] for line in text.splitlines()[:2]] == [
        ["one", "complete"],
        ["two", "died"],
    ]
    plain = watch(root, "--plain", "--metric", "loss", COLUMNS="100", LINES="30")
    assert "*" in plain and "+" in plain


def test_what_is_no_run_is_an_error(root, tmp_path):
    for place, says in ((tmp_path, "there is no run in it"), (root / "x", "no such folder")):
        done = CliRunner().invoke(main, ["watch", str(place)])
        assert done.exit_code == 2 and says in done.stderr


def test_broken_lines_and_escape_sequences_are_shown_as_what_they_are(tmp_path):
    run = write_run(tmp_path / "odd\x1b[2J", end={"outcome": "failed", "error": "no\x1b]0;title"})
    with (run / "metrics.jsonl").open("a") as file:
        file.write("not a record\n" + json.dumps({"step": 21, "loss": None}) + "\n")
    text = watch(run, COLUMNS="120")
    assert "\x1b" not in text
    assert "failed (no\\u001b]0;title)" in text
    assert "1 line is not a record and skipped" in text
    assert "(1 not finite) loss" in text


def test_a_live_screen_follows_the_run_and_ends_with_it(tmp_path):
    """Without torch, so that it starts at once."""
    run = write_run(tmp_path / "live", steps=5)
    lock = (run / ".lock").open()
    fcntl.flock(lock, fcntl.LOCK_EX)
    ours, theirs = pty.openpty()
    code = (
        "import sys; from surefoot.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    words = [sys.executable, "-c", code, "watch", str(run), "--every", "0.1"]
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
