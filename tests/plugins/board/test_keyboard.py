"""What is in focus or under the mouse stays while a page is drawn anew, and keys reach all."""

import json

import pytest

from . import browser
from .pages import show
from .runs import COMPLETE, RECIPE, write_run

pytestmark = pytest.mark.skipif(bool(browser.MISSING), reason=str(browser.MISSING))
MOST = 400
FOCUSED = "const e = document.activeElement; return e.getAttribute('aria-label') || e.innerText"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    write_run(root / "runs/one", steps=300, end=COMPLETE)
    write_run(root / "runs/two", steps=200)
    (root / "runs/two/.heartbeat.json").write_text(f'{{"step": 200, "max_steps": {MOST}}}')
    (root / "mine.yaml").write_text(RECIPE.replace("runs/one", "runs/mine"))
    return root


def press(page, key, code=0, text=None):
    """One key, as a keyboard sends it."""
    event = {"key": key, "windowsVirtualKeyCode": code, **({"text": text} if text else {})}
    page.cdp("Input.dispatchKeyEvent", type="keyDown", **event)
    page.cdp("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)


def tab(page):
    press(page, "Tab", 9)


def enter(page):
    press(page, "Enter", 13, "\r")


def log_step(root, run, step):
    with (root / run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "loss": 1.0}) + "\n")


def test_the_first_key_leads_past_the_menu_and_not_to_another_page(page, server):
    show(page, server, "#/run?run=runs/one&tab=recipe")
    page.wait("return document.querySelector('pre.log')")
    tab(page)
    assert page.run(FOCUSED) == "Skip to content"
    enter(page)
    assert page.run("return document.activeElement.id") == "main"
    assert page.run("return location.hash") == "#/run?run=runs/one&tab=recipe"


def test_a_control_stays_while_the_figures_of_its_run_change(page, server, root):
    show(page, server, "#/run?run=runs/two")
    page.wait("return document.querySelector('canvas')")
    page.run(
        "window.before = [...document.querySelectorAll('button')]"
        ".find(e => e.innerText === 'Resume'); before.focus()"
    )
    page.errors()
    log_step(root, "runs/two", 201)
    page.wait("return document.querySelector('.figures').innerText.includes('201')")
    assert page.run("return before.isConnected && document.activeElement === before")
    bar = "return document.querySelector('[role=progressbar] i').style.width"
    assert page.run(bar) == f"{100 * 201 / MOST:g}%"
    assert page.errors() == []


def test_the_table_keeps_the_focus_while_it_changes_and_is_sorted(page, server, root):
    show(page, server, "#/runs")
    link = "[...document.querySelectorAll('tbody a')].find(e => e.innerText === 'runs/two')"
    page.wait(f"return {link}")
    page.run(f"window.before = {link}; before.focus()")
    log_step(root, "runs/two", 212)
    page.wait("return document.querySelector('tbody').innerText.includes('212')")
    assert page.run("return document.activeElement === before && before.isConnected")
    page.run(
        "[...document.querySelectorAll('th button')].find(e => e.innerText === 'Loss').focus()"
    )
    enter(page)
    page.wait("return document.querySelector('th[aria-sort]').innerText.includes('Loss ↑')")
    assert page.run(FOCUSED) == "Loss ↑"
    enter(page)
    page.wait("return document.querySelector('th[aria-sort]').innerText.includes('Loss ↓')")


def test_the_focus_is_on_the_new_page_after_a_link_in_the_old_one(page, server):
    show(page, server, "#/runs")
    page.wait("return document.querySelector('tbody a')")
    page.run("document.querySelector('tbody a').focus()")
    enter(page)
    page.wait("return document.querySelector('canvas')")
    page.wait("return document.activeElement.id === 'main'")


def test_the_theme_is_changed_twice_with_the_same_key(page, server):
    show(page, server, "#/new?file=mine.yaml")
    theme = "return document.documentElement.dataset.theme"
    page.run("document.querySelector('header button:last-child').focus()")
    enter(page)
    page.wait(f"{theme} === 'dark'")
    enter(page)
    page.wait(f"{theme} === 'light'")


def test_a_form_is_filled_in_from_field_to_field(page, server):
    show(page, server, "#/new?file=mine.yaml")
    page.wait("return document.getElementById('f-train.max_steps')")
    page.run("const e = document.getElementById('f-train.max_steps'); e.focus(); e.select()")
    page.cdp("Input.insertText", text="250")
    tab(page)
    there = page.run("return document.activeElement.id")
    assert there.startswith("f-train.")
    page.wait("return document.querySelector('textarea').value.includes('max_steps: 250')")
    assert page.run("return document.activeElement.id") == there


def test_a_click_on_a_command_selects_all_of_it_to_be_copied(page, server):
    show(page, server, "#/new?file=mine.yaml")
    page.wait_for("surefoot train mine.yaml")
    x, y = page.run(
        "const e = [...document.querySelectorAll('.command code')].at(-1); e.scrollIntoView();"
        "const box = e.getBoundingClientRect(); return [box.x + 9, box.y + box.height / 2]"
    )
    for kind in ("mousePressed", "mouseReleased"):
        page.cdp("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    assert page.run("return getSelection().toString()") == "surefoot train mine.yaml"
