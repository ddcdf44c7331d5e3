"""From New to Chat, in a browser, with a real run that is killed, and a server that is killed."""

import contextlib
import json
import os
import signal

import pytest
from ruamel.yaml import YAML
from transformers import AutoModelForCausalLM

from project import Project, losses
from surefoot.checkpoint.disk.commit import committed, step_of
from surefoot.checkpoint.disk.retention import pinned
from surefoot.training.callbacks.launches import is_alive

from . import browser
from .serving import Server

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(bool(browser.MISSING), reason=str(browser.MISSING)),
]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    train = {"output_dir": "runs/mine", "max_steps": 3000}
    found = Project(root, train=train, checkpoint={"save_steps": 100, "keep": 9})
    with found.recipe.open("w") as file:  # as people write it
        YAML().dump(found.sections, file)
    return found


def test_a_run_from_new_to_chat(project):
    root, run = project.folder, project.folder / "runs/mine"
    page, server = browser.Browser(), Server(project.folder)
    try:
        page.open(f"{server.address}#/new?file=recipe.yaml")
        start_from_the_form(page)
        server.kill()  # a crashed server finds all again, and training goes on
        page.wait_for("The board does not answer")
        before = len(losses(run))
        server = Server(root, port=server.port)
        page.wait("return !document.body.innerText.includes('The board does not answer')")
        page.open("about:blank")
        page.open(f"{server.address}#/runs")
        page.wait_for("running")
        wait_until(page, lambda: len(losses(run)) > before + 20)
        wait_until(page, lambda: len(committed(run)) > 1)
        die_resume_and_stop(page, server, run)
        pin_and_verify(page, run)
        prune(page, run)
        export(page, root, run)
        branch_off(page, root, run)
        look_at_data(page, server)
        talk(page, server)
        page.open(f"{server.address}#/runs")
        page.wait("return document.querySelectorAll('tbody tr').length === 2")
        for _ in range(2):
            page.run("document.querySelector('tbody input:not(:checked)').click()")
        page.wait("return document.querySelectorAll('.legend b').length === 2")
        assert not [one for one in page.errors() if "favicon" not in one and "ERR_" not in one]
    finally:
        page.close()
        server.close()
        for beat in root.glob("runs/*/.heartbeat.json"):
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(beat.read_text())
                if is_alive(found):
                    os.kill(found["pid"], signal.SIGKILL)


def start_from_the_form(page):
    page.click("Preview: what is trained on")
    page.wait_for("masked: read, not trained on", seconds=90)
    page.click("Plan: steps, memory, disk")
    page.wait_for("Memory of a process at its peak", seconds=90)
    page.click("Start training")
    page.wait_for("surefoot train recipe.yaml", seconds=60)
    page.wait_for("running", seconds=60)
    page.click("Curves")
    page.wait("return document.querySelectorAll('canvas').length > 3", seconds=60)


def die_resume_and_stop(page, server, run):
    beat = run / ".heartbeat.json"
    os.kill(json.loads(beat.read_text())["pid"], signal.SIGKILL)
    page.wait_for("died")
    page.open("about:blank")
    page.open(f"{server.address}#/run?run=runs/mine")
    page.click("Resume")
    page.wait_for("running", seconds=60)
    launches = run / "launches.jsonl"
    wait_until(page, lambda: '"resumed_from": "checkpoint' in launches.read_text())
    wait_until(page, lambda: json.loads(beat.read_text())["step"] > 300)
    page.click("Stop")
    page.click("Stop the run")
    page.wait_for("stopped", seconds=60)
    assert losses(run), "no step is logged twice"


def pin_and_verify(page, run):
    page.click("Checkpoints")
    page.wait(f"return document.querySelectorAll('tbody tr').length === {len(committed(run))}")
    choose_the_first(page)
    page.click("Pin")
    page.wait("return [...document.querySelectorAll('button')].some(b => b.innerText === 'Unpin')")
    assert pinned(run) == {step_of(committed(run)[0])}
    page.click("Verify")
    page.wait_for("Verified:", seconds=60)
    page.click("Curves")
    page.wait("return document.querySelectorAll('canvas').length > 3")
    page.click("Checkpoints")


def choose_the_first(page):
    """The first checkpoint is chosen, and no other."""
    page.wait("return document.querySelectorAll('tbody input').length > 1")
    page.run(
        "const boxes = () => [...document.querySelectorAll('tbody input')];"
        "boxes().forEach((_, i) => { if (boxes()[i].checked !== (i === 0)) boxes()[i].click(); })"
    )


def prune(page, run):
    """First a dry run, which deletes nothing; then what it has listed."""
    before = committed(run)
    page.wait("return document.getElementById('p-keep')")
    choose_the_first(page)
    page.run("document.getElementById('p-keep').value = '1'")
    page.click("Dry run")
    page.wait_for("Frees", seconds=60)
    page.click("Unpin")  # what was listed holds no longer
    page.wait("return !document.body.innerText.includes('Frees')")
    page.click("Pin")
    page.wait("return [...document.querySelectorAll('button')].some(b => b.innerText === 'Unpin')")
    page.click("Dry run")
    page.wait_for("Frees", seconds=60)
    assert "ckpt prune runs/mine --dry-run --json --keep=1" in page.text()
    fates = "return [...document.querySelectorAll('.panel.writes tbody tr')].map(r => r.innerText)"
    listed = page.run(fates)
    assert len(listed) == len(before)
    going = [line.split()[0] for line in listed if "delete" in line.split()]
    staying = [path.name for path in before if path.name not in going]
    assert before[0].name in staying, "it is pinned"
    assert before[-1].name in staying, "it is the latest"
    assert "pinned" in listed[0]
    assert committed(run) == before, "a dry run deletes nothing"
    page.click(f"Delete {len(going)} checkpoints")
    page.click("Delete")  # the question of the board
    page.wait_for("Freed", seconds=60)
    assert [path.name for path in committed(run)] == staying
    page.wait(f"return document.querySelectorAll('tbody tr').length === {len(staying)}")


def export(page, root, run):
    """The pinned checkpoint becomes a folder that transformers opens."""
    choose_the_first(page)
    page.run("window.prompt = () => 'exports/mine'")
    page.click("Export")
    page.wait_for("Exported to exports/mine", seconds=120)
    assert AutoModelForCausalLM.from_pretrained(root / "exports/mine").num_parameters()


def branch_off(page, root, run):
    """A new run begins with the pinned checkpoint, and says so."""
    page.click("New run from here")
    page.wait_for(f"It resumes from {committed(run)[0].name} of runs/mine")
    page.click("Start training")
    page.wait_for("running", seconds=90)
    page.wait_for(f"Continues runs/mine/{committed(run)[0].name}", seconds=120)
    (branch,) = root.glob("runs/mine-from-*")
    wait_until(page, lambda: losses(branch))
    page.click("Stop")
    page.click("Stop the run")
    page.wait_for("stopped", seconds=60)


def look_at_data(page, server):
    page.open(f"{server.address}#/new?run=runs/mine")
    page.click("Check all rows")
    page.wait_for("Check of all rows", seconds=90)


def talk(page, server):
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


def wait_until(page, condition):
    for _ in range(600):
        if condition():
            return
        page.run("return new Promise(r => setTimeout(r, 100))")
    raise AssertionError(page.text())
