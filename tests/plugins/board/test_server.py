import contextlib
import re
import sys
from functools import partial
from pathlib import Path

import httpx
import pytest

import commands
import surefoot.plugins.board
from surefoot.plugins.board.run_state import EVIDENCE

from .runs import write_run
from .serving import Server

STATIC = Path(surefoot.plugins.board.__file__).parent / "static"
get = partial(httpx.get, timeout=120)  # of a busy machine; five seconds are its own default
STATES = ("running", "complete", "stopped", "failed", "died", "ended", "unknown")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    write_run(root / "runs/one")
    return root


@pytest.fixture(scope="module")
def server(root):
    with contextlib.closing(Server(root)) as found:
        yield found


def test_the_board_answers_where_it_says(server):
    assert get(server.address).status_code == 200
    assert get(f"{server.address}api/runs").json()["runs"]
    assert get(f"{server.address}api/schema").status_code == 200


def test_a_page_that_asks_for_the_state_hears_of_lines_that_came_or_went(server, root):
    path = root / "runs/one/metrics.jsonl"

    def num_rows():
        return get(f"{server.address}api/state?run=runs/one").json()["num_rows"]

    before = num_rows()
    with path.open("a") as file:
        file.write('{"step": 21, "loss": 0.4}\n')
    assert num_rows() == before + 1
    path.write_text('{"step": 1, "loss": 2.0}\n')
    assert num_rows() == 1
    assert get(f"{server.address}api/state?run=no").json() == {"state": "gone"}


def test_a_port_that_is_taken_is_said(server, root):
    assert "another board running" in commands.refused("board", root, f"--port={server.port}")


def test_a_missing_package_is_said_with_what_to_install(root, monkeypatch):
    ours = ("surefoot.plugins.board", "surefoot.storage.web")
    for name in [n for n in sys.modules if n.startswith(ours)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install -e '.[board]'" in commands.refused("board", root)


@pytest.mark.parametrize(
    ("option", "host"),
    [
        ("--host=0.0.0.0", "127.0.0.1"),
        pytest.param("--host-name=board.example.org", "board.example.org", marks=pytest.mark.proof),
    ],
)
def test_a_board_that_others_reach_needs_a_token_on_this_machine_too(root, option, host):
    server, asked = Server(root, option), {"Host": host}
    try:
        here = f"http://127.0.0.1:{server.port}/"
        assert get(here, headers=asked).status_code == 401
        token = re.search(r"token=(\S+)", server.said)[1]
        with httpx.Client(timeout=120, headers=asked, follow_redirects=True) as client:
            assert client.get(f"{here}?token={token}").status_code == 200
            bearer = {"Authorization": f"Bearer {token}"}
            assert client.get(f"{here}api/runs", headers=bearer).status_code == 200
            assert client.get(f"{here}api/runs").status_code == 200  # by the cookie of the page
            evil = {"Host": f"evil.example:{server.port}"}
            assert client.get(f"{here}api/runs", headers=evil).status_code == 421
    finally:
        server.close()


def imports_of(path, found):
    """A module of a page, and all that it imports before it runs."""
    if path not in found:
        found.add(path)
        for name in re.findall(r'^import .* from "\./(.+)";$', path.read_text(), re.M):
            imports_of(STATIC / name, found)
    return found


@pytest.mark.parametrize("page", ["runs", "run", "new", "chat"])
def test_no_page_is_larger_than_150_kilobytes_without_data(page):
    names = ["index.html", "style.css", "theme.js", "icon.svg", "zh.js", "vendor/uPlot.css"]
    files = {STATIC / name for name in [*names, "vendor/uPlot.js"]}
    imports_of(STATIC / "app.js", files)
    imports_of(STATIC / f"{page}.js", files)
    assert sum(path.stat().st_size for path in files) < 150_000


def test_every_text_has_its_chinese_and_nothing_is_translated_in_vain():
    code = "\n".join(p.read_text() for p in STATIC.glob("*.js") if p.name != "zh.js")
    states = {f"state:{name}" for name in (*STATES, "gone", "starting", "not_started")}
    chinese = dict(re.findall(r'"([^"]+)": "([^"]*)",', (STATIC / "zh.js").read_text()))
    asked = set(re.findall(r'\bt\("([^"]+)"', code))
    asked |= set(re.findall(r'\b(?:cell|act|field)\("([^"]+)"', code)) - {"loss"}
    asked |= set(re.findall(r'(?:label|title): "([^"]+)"', code))
    asked |= {
        key for both in re.findall(r'\bt\([^"\n]*\? "([^"]+)" : "([^"]+)"', code) for key in both
    }
    asked |= set(re.findall(r'"(\w+:\w+)": "', (STATIC / "i18n.js").read_text(), re.M))
    asked |= states | set(EVIDENCE.values())
    asked -= {"keep", "keep_every", "keep_best", " ↑", " ↓"}
    assert not asked - chinese.keys()
    verdicts = {"differs", "only in A", "only in B", "other shape", "other type"}  # of a diff
    said = {key for key in chinese if f'"{key}"' in code}
    assert chinese.keys() == said | verdicts | states | set(EVIDENCE.values())
    for english, text in chinese.items():
        assert set(re.findall(r"\{\w+\}", english)) == set(re.findall(r"\{\w+\}", text)), english


def test_pages_ask_no_other_host_and_never_write_html():
    for path in STATIC.glob("*.*"):
        text = path.read_text()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
