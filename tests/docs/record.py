"""Do what the demo and the tutorial say, and put what came out into them; draw the picture.

    .venv/bin/python tests/docs/record.py

In a folder of its own that looks like a fresh clone, every command of a ``console`` block runs for
real, to its full length (a few minutes in all), and its output replaces the old one. For when the
demo or a screen has changed; the tests only check that the commands work.
"""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from itertools import pairwise
from pathlib import Path

from pages import DEMO, ROOT, SHELLS, TUTORIAL, blocks, steps
from rich.console import Console
from rich.text import Text

PICTURE = ROOT / "docs" / "img" / "train.svg"
SCENE = (
    "timeout -s KILL 30 surefoot train examples/quickstart.yaml checkpoint.save_steps=20",
    "surefoot train examples/quickstart.yaml checkpoint.save_steps=20",
)
COLUMNS, WIDE = 100, 142  # of text, and of the picture: its live line is one line
LONGEST, FIRST, LAST = 24, 13, 9  # lines of an output; if it is longer, so many are shown
SKIPPED = ("make", "source", "pip")
STYLES = re.compile(r"\x1b\[[\d;]*m")


def environment(folder, columns):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": path, "COLUMNS": str(columns), "XDG_CACHE_HOME": str(folder / ".cache")}
    return {**os.environ, **own, "TERM": "xterm-256color", "PS1": "$ "}


def record(page, folder):
    """Follow a page; its text with the outputs of today."""
    text = page.read_text(encoding="utf-8")
    for block in blocks(page):
        if block.title:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.text)
        elif block.language in SHELLS:
            outputs = [(line, run(line, folder)) for line, _ in steps(block)]
            if block.language == "console":
                shown = "".join(f"$ {line}\n{output}" for line, output in outputs)
                text = text.replace(f"```console\n{block.text}```", f"```console\n{shown}```")
    page.write_text(text, encoding="utf-8")


def run(line, folder):
    """What a line of shell prints, shortened, as it would stand on a screen."""
    if line.startswith(SKIPPED):
        return ""
    print("$", line, flush=True)
    done = subprocess.run(
        line,
        shell=True,
        cwd=folder,
        env=environment(folder, COLUMNS),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    printed = done.stdout.replace(f"{folder}/", "").splitlines()
    if done.returncode in (-9, 137):
        printed += ["Killed"] * (printed[-1:] != ["Killed"])
    elif done.returncode and not done.stdout.startswith("error:"):
        raise SystemExit(f"{line}: {done.stdout}")
    return shortened(printed)


def shortened(printed):
    """Lines of output, without the middle if they are many, and without blank ones in a row."""
    stripped = ["", *(shown.rstrip() for shown in printed)]
    printed = [shown for before, shown in pairwise(stripped) if before or shown]
    if len(printed) > LONGEST:
        printed = [*printed[:FIRST], "...", *printed[-LAST:]]
    return "\n".join(printed).rstrip() + "\n" * bool(printed)


def draw(folder):
    """The picture: the scene in a real terminal, as its screen looks at the end."""
    console = Console(record=True, width=WIDE, file=io.StringIO(), force_terminal=True)
    for shown in screen(typed(SCENE, folder)):
        text = Text.from_ansi(shown)
        if text.plain.startswith("$ "):
            text.stylize("bold cyan")
        console.print(text, soft_wrap=True)
    PICTURE.write_text(console.export_svg(title="surefoot"), encoding="utf-8")


def typed(commands, folder):
    """All that a terminal gets when these commands are typed into a shell."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        shell = ["bash", "--norc", "--noprofile", "--noediting", "-i"]
        os.execvpe(shell[0], shell, environment(folder, WIDE))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, WIDE, 0, 0))
    data, left = b"", [*commands, "exit"]
    while piece := read(terminal):
        data += piece
        if data.endswith(b"$ ") and left:
            os.write(terminal, f"{left.pop(0)}\n".encode())
    os.waitpid(child, 0)
    return data.decode().rpartition("$ exit")[0]


def read(terminal):
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the shell is gone
        return b""


def screen(data):
    """The rows that are left when a terminal has obeyed what rich writes: up, erase, and so on."""
    rows, row = [""], 0
    for word in re.split(r"(\n|\r|\x1b\[\d*A|\x1b\[2K)", re.sub(r"\x1b\[\?\d+[lh]", "", data)):
        if word == "\x1b[2K":
            rows[row] = ""
        elif word.endswith("A") and word.startswith("\x1b"):
            row -= int(word[2:-1] or 1)
        elif word != "\r":
            is_full = word != "\n" and word and len(STYLES.sub("", rows[row])) >= WIDE
            row += word == "\n" or bool(is_full)
            rows += [""] * (row + 1 - len(rows))
            rows[row] += word.strip("\n")
    return [shown.rstrip() for shown in rows if STYLES.sub("", shown).strip()]


def main():
    with tempfile.TemporaryDirectory() as name:
        for page in (DEMO, TUTORIAL):
            folder = Path(name) / page.stem
            folder.mkdir()
            (folder / "examples").symlink_to(ROOT / "examples")
            record(page, folder)
        folder = Path(name) / "picture"
        folder.mkdir()
        (folder / "examples").symlink_to(ROOT / "examples")
        draw(folder)


if __name__ == "__main__":
    main()
