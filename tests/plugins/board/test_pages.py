"""The pages in a real browser, over runs that nobody trained."""

import json
import math

import pytest

from each import some

from . import browser
from .pages import check_on_a_phone, click, show, violations
from .runs import COMPLETE, RECIPE, write_run

pytestmark = pytest.mark.skipif(bool(browser.MISSING), reason=str(browser.MISSING))
PAGES = ["#/runs", "#/run?run=runs/one", "#/run?run=runs/one&tab=samples", "#/chat"]
PAGES += ["#/run?run=runs/one&tab=checkpoints", "#/run?run=runs/one&tab=log"]
LONG = "recipes/one-with-a-name-that-is-longer-than-a-phone-is-wide.yaml"
PAGES += ["#/run?run=runs/one&tab=recipe", f"#/new?file={LONG}"]
EVIL = "<img src=x onerror=alert(1)>"
DOT = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGA"
    "WjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    one = write_run(root / "runs/one", steps=300, end=COMPLETE)
    write_run(root / "runs/two", steps=200, offset=0.5, recipe=RECIPE.replace("100", "200"))
    (root / "mine.yaml").write_text(RECIPE.replace("runs/one", "runs/mine"))
    (root / LONG).parent.mkdir()
    (root / LONG).write_text(RECIPE + "# and so on\n" * 20)
    row = {"origin": EVIL, "prompt": EVIL, "reference": "4", "answer": EVIL, "match": False}
    row |= {"pictures": [DOT, "https://example.com/a.png", 3]}
    (one / "generations-base.jsonl").write_text(json.dumps(row) + "\n")
    return root


@pytest.mark.parametrize("hash_", some(PAGES, PAGES[::2]))
def test_every_page_fits_a_phone_in_the_dark_and_in_chinese(page, server, hash_):
    check_on_a_phone(page, server, hash_)


def test_samples_show_the_pictures_of_a_prompt_that_are_in_the_file(page, server):
    show(page, server, "#/run?run=runs/one&tab=samples")
    page.wait_for("Answers to held-out prompts")
    sources = "return [...document.querySelectorAll('.panel img')].map(e => e.src).join()"
    assert page.run(sources) == DOT


def test_runs_are_sorted_filtered_compared_and_drawn_in_one_picture(page, server):
    page.size(1280, 900)
    show(page, server, "#/runs")
    rows = "return [...document.querySelectorAll('tbody tr')].map(r => r.dataset.run).join()"
    page.wait(f"{rows} !== ''")
    page.click("Loss")
    page.wait(f"{rows} === 'runs/one,runs/two'")
    page.click("Loss ↑")
    assert page.run(rows) == "runs/two,runs/one"
    search = (
        "const e = document.querySelector('input[type=search]'); e.value = arguments[0];"
        "e.dispatchEvent(new Event('input'))"
    )
    page.run(search, "died")
    assert page.run(rows) == "runs/two"
    page.run(search, "")
    for _ in range(2):
        page.run("document.querySelector('tbody input:not(:checked)').click()")
    page.wait_for("train.max_steps")
    page.wait("return document.querySelectorAll('.legend b').length === 2")
    assert page.run("return document.querySelectorAll('canvas').length") == 1


def test_curves_are_live_zoomed_and_on_a_log_scale(page, server, root):
    show(page, server, "#/run?run=runs/two")
    page.wait("return document.querySelectorAll('canvas').length >= 4")
    loss = "return Number(document.querySelector('.chart .legend b').innerText)"
    assert page.run(loss) == pytest.approx(2 / math.sqrt(200) + 0.5, rel=1e-3)
    with (root / "runs/two/metrics.jsonl").open("a") as file:
        file.write('{"step": 210, "loss": 0.125, "learning_rate": 0.001}\n')
    page.wait(f"{loss} === 0.125", seconds=10)
    page.click("Log scale")
    page.wait("return document.querySelector('button[aria-pressed=true]')")
    page.click("Log scale")
    key = (
        "document.querySelector('.plot').dispatchEvent("
        "new KeyboardEvent('keydown', { key: arguments[0], bubbles: true }))"
    )
    all_button = (
        "return [...document.querySelectorAll('button')].some("
        "b => b.innerText === 'Show all' && b.offsetParent)"
    )
    page.run(key, "+")
    page.wait(all_button)
    page.run(key, "0")
    page.wait(all_button.replace("return ", "return !"))
    with (root / "runs/two/metrics.jsonl").open("a") as file:
        file.write("nonsense\n")
    show(page, server, "#/run?run=runs/two")
    page.wait_for("1 line is not a record")


def test_a_click_on_a_point_of_the_loss_asks_for_the_rows_of_its_step(page, server):
    page.size(1280, 900)
    show(page, server, "#/run?run=runs/one")
    page.wait("return document.querySelectorAll('canvas').length >= 4")
    middle = page.run(
        "const { left, top, width, height } = document.querySelector('.u-over')"
        ".getBoundingClientRect(); return [left + width / 2, top + height / 2]"
    )
    click(page, *middle)
    field = "document.querySelector('input[type=number][aria-label=Step]').value"
    page.wait(f"return Math.abs(Number({field}) - 150) <= 20")
    page.wait_for("has no metrics of its steps and rows")  # a run of an earlier version


def test_what_a_dataset_or_a_model_says_is_text(page, server):
    show(page, server, "#/run?run=runs/one&tab=samples")
    page.wait_for(EVIL)
    assert page.run("return [...document.images].map(e => e.src).join()") == DOT  # of the file


def test_the_form_and_the_yaml_change_each_other_and_problems_have_lines(page, server):
    show(page, server, "#/new?file=mine.yaml")
    page.wait("return document.querySelector('textarea').value.includes('max_steps: 100')")
    edit = (
        "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        "e.dispatchEvent(new Event('change'))"
    )
    page.wait("return document.getElementById('f-train.max_steps')")
    page.run(edit, "f-train.max_steps", "250")
    page.wait("return document.querySelector('textarea').value.includes('max_steps: 250')")
    page.run(
        "const e = document.querySelector('textarea');"
        "e.value = e.value.replace('max_steps', 'max_step');"
        "e.dispatchEvent(new Event('input'))"
    )
    page.wait_for("did you mean max_steps?")
    assert page.run("return document.querySelector('.gutter .bad').innerText") == "5"
    assert page.run("return document.querySelector('button.primary').disabled")
    page.run(
        "const e = document.querySelector('textarea');"
        "e.value = e.value.replace('max_step:', 'max_steps:').replace('250', '350');"
        "e.dispatchEvent(new Event('input'))"
    )
    page.wait("return document.getElementById('f-train.max_steps').value === '350'")
    page.wait("return !document.querySelector('button.primary').disabled")
    assert "surefoot train mine.yaml" in page.text()


@pytest.mark.parametrize(
    "tab",
    [
        pytest.param("curves", marks=pytest.mark.proof),
        "log",
        pytest.param("recipe", marks=pytest.mark.proof),
    ],
)
def test_a_run_that_vanishes_is_shown_as_gone_and_its_page_asks_for_nothing_more(
    page, server, root, tab
):
    folder = write_run(root / f"runs/left {tab}")
    show(page, server, f"#/run?run=runs/left {tab}&tab={tab}")
    page.wait("return document.querySelector('canvas, pre.log')")
    page.errors()
    folder.rename(root / f"left {tab}")
    page.wait_for("The folder of this run was removed.")
    if tab != "curves":  # its last request may have been on its way
        page.run("return new Promise(done => setTimeout(done, 2500))")
        assert page.errors() == []


SAID = [
    {"text": "<think>\nI add.\n</think>\n\n", "probability": 0.5, "instead": [["<", 0.5]]},
    {"text": "Four.", "probability": 0.05, "instead": [["4", 0.9], [EVIL, 0.05]]},
]
ANSWER = {
    "event": "answer",
    "text": "".join(one["text"] for one in SAID),
    "finish_reason": "stop",
    "tokens": SAID,
    "tool_calls": [{"name": "add", "arguments": {"a": EVIL}}],
    "broken_calls": ["<tool_call>{"],
}
ANSWERING = """
const real = window.fetch; window.asked = [];
window.fetch = (address, options) => {
  const place = new URL(address, document.baseURI).pathname;
  if (!place.endsWith("/api/chat")) return real(address, options);
  window.asked.push(JSON.parse(options.body));
  return Promise.resolve(new Response(arguments[0] + "\\n"));
};
"""
SAY = """
const box = document.querySelector('textarea[aria-label=Message]'); box.value = arguments[0];
box.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter' }));
"""


def test_thoughts_calls_and_probabilities_are_shown_on_both_sides_with_one_seed(page, server):
    show(page, server, "#/chat?run=runs/one&b=base")
    page.wait("return document.querySelector('textarea[aria-label=Message]')")
    page.run(ANSWERING, json.dumps(ANSWER))
    page.run(SAY, "2+2?")
    page.wait("return document.querySelectorAll('.bubble.call').length === 2")
    assert page.run("return document.querySelector('.bubble.thought').innerText").count("I add.")
    assert "Four." not in page.run("return document.querySelector('.bubble.thought').innerText")
    assert f'add({{"a":"{EVIL}"}})' in page.text()
    assert "a tool call that cannot be read: <tool_call>{" in page.text()
    page.run("document.querySelectorAll('.tok')[1].focus()")
    assert "p = 0.0500" in page.run("return document.querySelector('.tip').innerText")
    assert page.run("return document.images.length") == 0
    page.run(SAY, "4")
    page.wait("return window.asked.length === 4")
    one, other, *later = page.run("return window.asked")
    assert (one["seed"], one["checkpoint"], other["checkpoint"]) == (other["seed"], "", "base")
    assert [message["role"] for message in later[0]["messages"]] == ["user", "assistant", "tool"]
    assert violations(page) == []
