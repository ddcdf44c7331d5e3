"""From New to Chat, in a browser, with a real run that is killed, and a server that is killed."""

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from board import browser
from board.serving import Server
from project import Project, losses
from surefoot.callbacks.launches import is_alive

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(bool(browser.MISSING), reason=str(browser.MISSING)),
]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    train = {"output_dir": "runs/mine", "max_steps": 3000}
    found = Project(root, train=train, checkpoint={"save_steps": 100})
    with found.recipe.open("w") as file:  # as people write it
        YAML().dump(found.sections, file)
    return found


def test_a_run_from_new_to_chat(project):
    root, run = project.folder, project.folder / "runs/mine"
    launches = run / "launches.jsonl"
    page, server = browser.Browser(), Server(project.folder)
    try:
        page.open(f"{server.address}#/new?file=recipe.yaml")
        page.click("Preview: what is trained on")
        page.wait_for("masked: read, not trained on", seconds=90)
        page.click("Plan: steps, memory, disk")
        page.wait_for("Memory of a process at its peak", seconds=90)
        picture(page, "new")
        page.click("Start training")
        page.wait_for("surefoot train recipe.yaml", seconds=60)
        page.wait_for("running", seconds=60)
        page.click("Curves")
        page.wait("return document.querySelectorAll('canvas').length > 3", seconds=60)

        server.kill()  # a crashed server finds all again, and training goes on
        before = len(losses(run))
        server = Server(root, port=server.port)
        page.open("about:blank")
        page.open(f"{server.address}#/runs")
        page.wait_for("running")
        wait_until(page, lambda: len(losses(run)) > before + 20)
        wait_until(page, lambda: any(run.glob("checkpoint-*")))

        os.kill(json.loads((run / ".heartbeat.json").read_text())["pid"], signal.SIGKILL)
        page.wait_for("died")
        page.open("about:blank")
        page.open(f"{server.address}#/run?run=runs/mine")
        page.click("Resume")
        page.wait_for("running", seconds=60)
        wait_until(page, lambda: '"resumed_from": "checkpoint' in launches.read_text())
        beat = run / ".heartbeat.json"
        wait_until(page, lambda: json.loads(beat.read_text())["step"] > 100)
        page.run("window.confirm = () => true")
        page.click("Stop")
        page.wait_for("stopped", seconds=60)
        assert losses(run), "no step is logged twice"

        page.click("Checkpoints")
        page.click("Pin")
        page.wait_for("pinned")
        page.click("Verify")
        page.wait_for("Verified:", seconds=60)
        page.click("Curves")
        page.wait("return document.querySelectorAll('canvas').length > 3")
        picture(page, "run")
        page.click("Checkpoints")

        page.click("New run from here")
        page.wait_for("in a folder of its own")
        page.click("Start training")
        page.wait_for("running", seconds=90)
        page.wait_for("Continues runs/mine/checkpoint-", seconds=120)
        (branch,) = root.glob("runs/mine-from-*")
        wait_until(page, lambda: losses(branch))
        page.run("window.confirm = () => true")
        page.click("Stop")
        page.wait_for("stopped", seconds=60)

        page.open(f"{server.address}#/data?run=runs/mine")
        page.wait_for("masked: read, not trained on", seconds=90)
        page.click("Check all rows")
        page.wait_for("Check of all rows", seconds=90)
        picture(page, "data")
        page.open(f"{server.address}#/run?run=runs/mine&tab=checkpoints")
        page.click("Chat beside the base model")
        page.wait("return document.querySelector('textarea[aria-label=Message]')")
        page.run(
            "const e = document.querySelector('textarea[aria-label=Message]');"
            "e.value = 'What is 1 plus 2?';"
            "[...document.querySelectorAll('button')].find(b => b.innerText === 'Send').click()"
        )
        page.wait("return document.querySelectorAll('.bubble .tok').length > 4", seconds=120)
        page.wait("return document.querySelectorAll('.messages .bubble').length > 3", seconds=120)
        picture(page, "chat")
        page.open(f"{server.address}#/runs")
        page.wait_for("runs/mine-from-")
        for _ in range(2):
            page.run("document.querySelector('tbody input:not(:checked)').click()")
        page.wait("return document.querySelectorAll('.legend b').length === 2")
        picture(page, "runs")
        assert not [one for one in page.errors() if "favicon" not in one and "ERR_" not in one]
    finally:
        page.close()
        server.close()
        for beat in root.glob("runs/*/.heartbeat.json"):
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(beat.read_text())
                if is_alive(found):
                    os.kill(found["pid"], signal.SIGKILL)


def picture(page, name):
    """Write a picture of the documentation: ``PICTURES=docs/img pytest tests/board``."""
    folder = os.environ.get("PICTURES")
    if folder:
        from PIL import Image

        path = Path(folder) / f"board-{name}.png"
        page.picture(path)
        Image.open(path).convert("RGB").quantize(48).save(path, optimize=True)


def wait_until(page, condition):
    for _ in range(600):
        if condition():
            return
        page.run("return new Promise(r => setTimeout(r, 100))")
    raise AssertionError(page.text())
