"""The list of runs: what has not begun, what is newest, and what a new run can be made of."""

import json
import os
import time

import pytest

from . import browser
from .pages import show
from .runs import COMPLETE, write_run
from .serving import Server
from .test_keyboard import press

pytestmark = pytest.mark.skipif(bool(browser.MISSING), reason=str(browser.MISSING))
WRONG = "train.batch_size: is no setting"


def fail_to_start(folder, seconds_ago):
    folder.mkdir()
    events = [{"event": "launch", "time": 1.0}, {"event": "end", "outcome": "failed"}]
    events[1] |= {"time": 2.0, "error": f"{WRONG}\nand more"}
    file = folder / "launches.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in events))
    os.utime(file, (time.time() - seconds_ago,) * 2)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    write_run(root / "runs/older", end=COMPLETE)
    write_run(root / "runs/newer", steps=30)
    for name in ("metrics.jsonl", "launches.jsonl", "recipe.yaml"):
        os.utime(root / "runs/older" / name, (1e9, 1e9))
    fail_to_start(root / "runs/another", 60)
    fail_to_start(root / "runs/bad", 9000)
    (root / "model").mkdir()
    (root / "model/config.json").write_text("{}")
    (root / "rows.csv").write_text("question,answer\n1,2\n")
    return root


def rows(page):
    return page.run("return [...document.querySelectorAll('tbody tr')].map(r => r.dataset.run)")


def test_a_run_that_did_not_start_says_why_and_an_old_one_is_hidden(page, server):
    show(page, server, "#/runs")
    page.wait("return document.querySelector('tbody tr')")
    assert rows(page) == ["runs/newer", "runs/another", "runs/older"]
    assert page.run("return document.querySelectorAll('tbody small')[1].innerText") == WRONG
    page.click("1 did not start")
    assert "runs/bad" in rows(page)
    page.click("1 did not start")
    assert "runs/bad" not in rows(page)


def test_what_has_not_begun_cannot_be_resumed_or_talked_to(page, server):
    show(page, server, "#/run?run=runs/another")
    page.wait_for("did not start")
    assert page.run("return document.querySelectorAll('[role=alert], .note.bad').length") == 1
    buttons = "return [...document.querySelectorAll('#main button, #main a')].map(e => e.innerText)"
    assert not {"Resume", "Chat", "New run like this"} & set(page.run(buttons))
    show(page, server, "#/run?run=runs/newer")
    page.wait_for("Resume")
    assert "Chat" in page.run(buttons)
    page.wait("return document.querySelector('.tabs a')")
    assert (
        page.run("return getComputedStyle(document.querySelector('.tabs')).overflowY") == "hidden"
    )


def test_a_chat_begins_with_the_run_that_trained_last(page, server):
    show(page, server, "#/chat")
    chosen = "return document.querySelector('select[aria-label=Run]')?.value"
    assert page.wait(chosen) == "runs/newer"


def test_the_comparison_is_beside_the_table(page, server):
    page.size(1440, 900)
    show(page, server, "#/runs")
    page.wait("return document.querySelector('tbody tr')")
    for _ in range(2):
        page.run("document.querySelector('tbody input:not(:checked):not(:disabled)').click()")
    page.wait("return document.querySelectorAll('.legend b').length === 2")
    box = "const b = document.querySelector(arguments[0]).getBoundingClientRect();"
    table = page.run(f"{box} return [b.right, b.top]", "table.runs")
    picture = page.run(f"{box} return [b.left, b.top, b.right]", "canvas")
    assert picture[0] >= table[0]
    assert 0 < picture[1] < 500
    assert picture[2] <= 1440
    page.size(1280, 900)


def test_keys_open_the_pages_in_the_order_of_the_menu(page, server):
    show(page, server, "#/runs")
    names = page.run("return [...document.querySelectorAll('nav a')].map(e => e.innerText)")
    assert len(names) == 3
    for number, name in enumerate(names, 1):
        press(page, str(number), ord(str(number)), str(number))
        page.wait(
            "const a = document.querySelector('nav a[aria-current]');"
            "return a?.innerText === arguments[0] && document.querySelector('#main h1')",
            name,
        )
        press(page, "Escape", 27)


def test_a_new_run_chooses_its_model_and_its_file(page, server):
    show(page, server, "#/new")
    choose = (
        "const e = [...document.querySelectorAll('select')].find(s =>"
        " [...s.options].some(o => o.value === arguments[0])); e.value = arguments[0];"
        "e.dispatchEvent(new Event('change'))"
    )
    for value, line in (("model", "path: model"), ("rows.csv", "rows.csv")):
        page.run(choose, value)
        page.wait("return document.querySelector('textarea').value.includes(arguments[0])", line)
    assert "path: model\n" in page.run("return document.querySelector('textarea').value")


def test_an_empty_board_offers_the_bundled_run(page, tmp_path):
    empty = Server(tmp_path)
    try:
        page.open(f"{empty.address}static/icon.svg")
        show(page, empty, "#/runs")
        page.click("Train the demo")
        page.wait("return location.hash.startsWith('#/run?run=surefoot-demo')")
        page.wait_for("surefoot demo surefoot-demo")
        page.wait_for("starting")
        page.errors()
    finally:
        log = (tmp_path / "surefoot-demo/runs/quickstart/launches.jsonl").read_text()
        os.kill(json.loads(log.splitlines()[0])["pid"], 9)
        empty.close()
