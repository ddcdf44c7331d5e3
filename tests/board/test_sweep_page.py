"""The pages of sweeps in a real browser, over sweeps that nobody ran."""

import json

import pytest

from board import browser
from board.pages import check_on_a_phone, show
from board.runs import write_sweep

pytestmark = pytest.mark.skipif(bool(browser.MISSING), reason=str(browser.MISSING))
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    write_sweep(root / "sweeps/one")
    write_sweep(root / "sweeps/evil", name=EVIL)
    return root


def test_a_sweep_has_a_line_and_a_row_for_each_trial(page, server, root):
    page.size(1280, 900)
    show(page, server, "#/sweeps")
    page.click("sweeps/one")
    page.wait("return document.querySelectorAll('path.trial').length === 5")
    assert page.run("return document.querySelectorAll('path.trial.best').length") == 1
    rows = "return [...document.querySelectorAll('tbody tr')].map(r => r.dataset.trial).join()"
    assert page.run(rows) == "3,2,1,0,4,5", "the best first, then what has no result"
    assert "worse than the median at 20" in page.text()
    assert "optim.adamw.learning_rate" in page.text()
    assert "75 %" in page.text()
    page.run(
        "document.querySelector('tr[data-trial=\"2\"]').dispatchEvent(new Event('mouseenter'))"
    )
    assert page.run("return document.querySelector('path.marked').dataset.trial") == "2"
    results = json.loads((root / "sweeps/one/results.json").read_text())
    results["trials"][5] |= {"state": "complete", "value": 1.0, "step": 20}
    (root / "sweeps/one/results.json").write_text(json.dumps({**results, "best": 5}))
    page.wait(f"{rows} === '5,3,2,1,0,4'", seconds=10)
    page.run(
        "document.querySelector('tr[data-trial=\"5\"]').dispatchEvent(new Event('mouseenter'))"
    )
    assert page.run("return document.querySelector('path.marked').dataset.trial") == "5"
    page.run("document.querySelector('path.trial.best').dispatchEvent(new Event('click'))")
    page.wait("return location.hash.includes('trial-0005')")
    show(page, server, "#/sweep?sweep=sweeps/evil")
    page.wait_for(EVIL)
    assert page.run("return document.images.length") == 0


QUICK = "window.real = setTimeout; window.setTimeout = (call, ms) => real(call, ms / 30)"
ASKED = (
    "return performance.getEntriesByType('resource').filter(e => e.name.includes('/api/')).length"
)


def test_a_sweep_that_vanishes_is_asked_for_no_more(page, server, root):
    folder = write_sweep(root / "sweeps/gone")
    page.open(f"{server.address}static/icon.svg")
    page.open(f"{server.address}#/data")
    page.wait("return document.querySelector('h1')")
    page.run(QUICK + "; location.hash = arguments[0]", "#/sweep?sweep=sweeps/gone")
    page.wait("return document.querySelectorAll('path.trial').length")
    folder.rename(root / "no longer")
    page.wait_for("The folder of this sweep was removed.")
    asked = page.run(ASKED)
    page.run("return new Promise(done => real(done, 400))")
    assert page.run(ASKED) == asked
    assert sum("/api/sweep" in one for one in page.errors()) == 1, "what it learned it from"


@pytest.mark.parametrize("hash_", ["#/sweeps", "#/sweep?sweep=sweeps/one"])
def test_the_pages_of_sweeps_fit_a_phone_in_the_dark_and_in_chinese(page, server, hash_):
    check_on_a_phone(page, server, hash_)
