"""The pictures of the board in ``docs``, of the demo's runs and of the run of the page of a spike;
``make pictures`` writes them.

Each contains the words of the board that it shows, as text, which a test of the pages compares with
the words that the board has today.
"""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs.pages import PAGES, STEP_45, blocks

from . import browser
from .pages import click, show
from .serving import SOURCE, Server
from .words import words

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(bool(browser.MISSING), reason=str(browser.MISSING)),
]
EXAMPLES = Path(__file__).parents[3] / "examples"
COMMITTED = Path(__file__).parents[3] / "docs/img"
MAX_BYTES = 120_000
COLORS = 64
ORDER = "Write this order as a record.\nTwo silk jars for Ada Brandt in Rome, please."


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The demo, and a run of it with another rate."""
    root = tmp_path_factory.mktemp("root")
    for name in ("base-model", "data"):
        shutil.copytree(EXAMPLES / name, root / name)
    shutil.copy(EXAMPLES / "quickstart.yaml", root)
    surefoot(root, "train", "quickstart.yaml")
    slower = ["train.output_dir=runs/lower-rate", "optim.adamw.learning_rate=5e-4"]
    surefoot(root, "train", "quickstart.yaml", *slower, "train.num_epochs=1")
    return root


@pytest.fixture(scope="module")
def server(root):
    with contextlib.closing(Server(root)) as found:
        yield found


@pytest.fixture
def spike(tmp_path, monkeypatch):
    """A board over the run of the page of a spike."""
    monkeypatch.chdir(tmp_path)  # rows are named by their file from there
    (tmp_path / "examples").symlink_to(EXAMPLES)
    for block in blocks(STEP_45):
        if block.title:
            Path(block.title).parent.mkdir(exist_ok=True)
            Path(block.title).write_text(block.text, encoding="utf-8")
    subprocess.run([sys.executable, "plant.py"], check=True)
    surefoot(tmp_path, "train", "my/planted.yaml")
    with contextlib.closing(Server(tmp_path)) as found:
        yield found


def surefoot(root, *words):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "surefoot", *words]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.fixture
def look(page, server):
    """Show a page, wait for a text, and write its picture; looked at on a phone and in the dark."""

    def looking(name, hash_, ready, prepare=lambda: None, size=(1280, 800), server=server):
        page.size(*size)
        page.open(f"{server.address}static/icon.svg")  # what is stored is of a server
        show(page, server, hash_)
        prepare()
        page.wait(ready, seconds=120)
        page.run("return new Promise(done => setTimeout(done, 400))")
        page.run(
            "document.activeElement?.classList.contains('tok') || document.activeElement?.blur()"
        )
        picture(page, f"board-{name}")
        page.size(390, 844, phone=True)
        page.run("document.documentElement.dataset.theme = 'dark'")
        page.run("return new Promise(done => setTimeout(done, 400))")
        assert page.run("return document.documentElement.scrollWidth") == 390
        if folder := os.environ.get("PHONES"):
            page.picture(Path(folder) / f"phone-{name}.png")
        page.size(1280, 800)

    return looking


def picture(page, name):
    """A palette PNG that is small enough for the repository."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    folder = os.environ.get("PICTURES")
    with io.BytesIO() as data:
        page.picture(raw := Path(page.folder) / f"{name}.png")
        image = Image.open(raw).convert("RGB")
        palette = image.quantize(COLORS, dither=Image.Dither.NONE)
        shown = PngInfo()
        shown.add_itxt("words", json.dumps(sorted(w for w in words() if w in page.text())))
        palette.save(data, "PNG", optimize=True, pnginfo=shown)
        found = data.getvalue()
    assert 8_000 < len(found) < MAX_BYTES
    if folder:
        fonts = subprocess.run(["fc-list", ":lang=zh"], capture_output=True, check=True).stdout
        assert fonts, "needs a Chinese font (Debian's fonts-noto-cjk), else 中文 is two boxes"
        (Path(folder) / f"{name}.png").write_bytes(found)


def test_runs(page, look):
    def choose():
        page.wait("return document.querySelectorAll('tbody tr').length > 1")
        for name in ("runs/quickstart", "runs/lower-rate"):
            page.run(f"document.querySelector('tr[data-run=\"{name}\"] input').click()")
        step = "document.querySelector('th button[data-key=step]').click()"
        page.run(f"{step}; {step}")  # the longest runs first

    ready = "return document.querySelectorAll('.legend b').length === 2"
    look("runs", "#/runs", ready, choose)


def test_run(look):
    ready = "return document.querySelectorAll('canvas').length > 3"
    look("run", "#/run?run=runs/quickstart", ready, size=(1280, 1000))


def test_rows(page, look, spike):
    """A click on the point of step 45, of the points of steps 5 to 60."""

    def prepare():
        page.wait("return document.querySelectorAll('canvas').length > 3")
        page.click("Log scale")
        point = page.run(
            "const { left, top, width, height } = document.querySelector('.u-over')"
            ".getBoundingClientRect(); return [left + width * 40 / 55, top + height / 2]"
        )
        click(page, *point)

    ready = (
        "return document.body.innerText.includes('line 465: loss 12') &&"
        "document.querySelector('.u-over').getBoundingClientRect().bottom < innerHeight"
    )
    look("rows", "#/run?run=runs/planted", ready, prepare, (1280, 1060), spike)


def test_new(page, look):
    ready = "return document.body.innerText.includes('Memory of a process at its peak')"
    prepare = lambda: page.click("Plan: steps, memory, disk")  # noqa: E731
    look("new", "#/new?file=quickstart.yaml", ready, prepare, (1280, 1200))


def test_data(page, look):
    def prepare():
        page.click("Check all rows")
        page.wait_for("Check of all rows", seconds=120)
        page.run("[...document.querySelectorAll('.panel')].at(-2).scrollIntoView()")

    ready = "return document.body.innerText.includes('Check of all rows')"
    look("data", "#/new?file=quickstart.yaml", ready, prepare, (1280, 1000))


def test_chat(page, look):
    def prepare():
        page.wait("return document.querySelector('textarea[aria-label=Message]')")
        page.run(
            "const e = document.querySelector('textarea[aria-label=Message]');"
            "e.value = arguments[0];"
            "[...document.querySelectorAll('button')].find(b => b.innerText === 'Send').click()",
            ORDER,
        )
        both = (
            "return [...document.querySelectorAll('.messages')].every(e => e.querySelector('.tok'))"
        )
        page.wait(both, seconds=120)
        page.run("document.querySelectorAll('.messages')[1].querySelectorAll('.tok')[3].focus()")

    look(
        "chat",
        "#/chat?run=runs/quickstart&b=base",
        "return document.querySelector('.tok')",
        prepare,
    )


def test_the_committed_pictures_are_small_and_those_of_the_pages():
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for path in COMMITTED.glob("board-*.png"):
        assert f"img/{path.name}" in pages
        assert path.stat().st_size < MAX_BYTES
        assert path.read_bytes()[25] == 3, "a palette"
