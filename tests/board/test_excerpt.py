"""A long file is shown at once by some of its lines, and soon by all of them."""

import itertools
import json
import math
import threading
import time

import pytest
from starlette.testclient import TestClient

from board.runs import write_run
from surefoot.board.app import create_app
from surefoot.board.metrics import known_files
from surefoot.board.metrics.excerpt import excerpt_of
from surefoot.board.metrics.known_files import KnownFiles
from surefoot.board.metrics.metrics_file import MetricsFile
from surefoot.board.metrics.thinning import thinned

STEPS = 120_000  # 16 MB


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    write_run(root / "long", steps=STEPS)
    write_run(root / "short", steps=20)
    return root


@pytest.fixture
def file(root):
    return root / "long/metrics.jsonl"


@pytest.fixture
def held(monkeypatch):
    """Reading in another thread begins when a test says so."""
    begin, threads = threading.Event(), []

    class Timer(threading.Thread):
        def __init__(self, _, call):
            super().__init__(target=lambda: (begin.wait(), call()))
            threads.append(self)

    monkeypatch.setattr(known_files.threading, "Timer", Timer)
    begin.threads = threads
    yield begin
    begin.set()
    for one in threads:
        one.join()


def pairs(column):
    return list(zip(column.steps, column.values, strict=True))


def test_an_excerpt_has_whole_lines_from_everywhere_and_the_end(file):
    found = excerpt_of(MetricsFile(file)).metrics
    rows = pairs(found.columns["loss"])
    assert 2000 < len(rows) == len(set(rows)) < STEPS / 4
    assert all(value == 2 / math.sqrt(step) for step, value in rows), "what is there is exact"
    steps = [step for step, _ in rows]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (1, STEPS)
    assert max(b - a for a, b in itertools.pairwise(steps)) < STEPS / 200
    assert pairs(found.columns["eval_loss"]) == [(STEPS, 0.5)]
    assert found.note() is None


@pytest.mark.parametrize("width", [1, 3000, 200_000])
def test_lines_of_any_length_and_broken_ones_are_no_others(tmp_path, width):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": n, "loss": 1.0 * n, "words": "x" * width} for n in range(60)]
    rows = [f'{json.dumps(row)}\n{{"step": 1, "lo\n' for row in rows]
    path.write_text("".join(rows) + '{"step": 99, "loss": 1.0}')  # not complete
    found = excerpt_of(MetricsFile(path)).metrics
    assert {(n, n) for n in range(58, 60)} <= set(pairs(found.columns["loss"]))
    assert set(pairs(found.columns["loss"])) <= {(n, n) for n in range(60)}
    assert excerpt_of(MetricsFile(tmp_path / "none")).metrics.columns == {}


def test_a_long_file_is_answered_by_an_excerpt_until_all_of_it_is_read(root, held):
    def get(path, **query):
        query = {"run": "long", "names": "loss,eval_loss", "points": 500, **query}
        return client.get(f"/api/{path}", params=query).json()

    with TestClient(create_app(root), base_url="http://127.0.0.1") as client:
        first = get("series", excerpt=True, smooth=8)
        assert 2000 < first["excerpt"]["lines"] < STEPS / 4
        assert first["excerpt"]["read"] == 0
        assert first["series"]["loss"]["total"] < STEPS
        assert "smooth" not in first["series"]["loss"]
        assert get("run", excerpt=True)["excerpt"]["lines"] == first["excerpt"]["lines"]
        assert len(held.threads) == 1, "one thread reads it"
        held.set()
        held.threads[0].join()
        then = get("series", excerpt=True, smooth=8)
        assert then["excerpt"] is None
        assert then["series"]["loss"]["total"] == STEPS
        assert "smooth" in then["series"]["loss"]
        assert get("run", excerpt=True)["excerpt"] is None


def test_without_excerpt_every_answer_is_of_all_lines(root, held):
    with TestClient(create_app(root), base_url="http://127.0.0.1") as client:
        query = {"run": "long", "names": "loss"}
        client.get("/api/series", params={**query, "excerpt": True})
        found = client.get("/api/series", params=query).json()
        assert (found["series"]["loss"]["total"], found["excerpt"]) == (STEPS, None)


def test_a_short_file_is_never_an_excerpt(root, held):
    with TestClient(create_app(root), base_url="http://127.0.0.1") as client:
        query = {"run": "short", "names": "loss", "excerpt": True}
        assert client.get("/api/series", params=query).json()["excerpt"] is None
        assert client.get("/api/run", params=query).json()["excerpt"] is None
    assert not held.threads


def test_a_file_that_was_read_and_has_grown_by_much_is_an_excerpt_again(tmp_path, held, file):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n')
    files = KnownFiles()
    assert files.soon(path).num_rows == 1
    path.write_bytes(path.read_bytes() + file.read_bytes())
    assert files.soon(path).facts()["lines"] > 1000
    held.set()
    held.threads[0].join()
    assert files.soon(path).num_rows == STEPS + 2


def test_curves_are_whole_while_another_thread_reads_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.touch()
    found, end = MetricsFile(path), time.monotonic() + 0.5

    def write():
        step = 0
        while time.monotonic() < end:
            rows = [json.dumps({"step": step + n, "loss": float(n)}) for n in range(300)]
            with path.open("a") as file:
                file.write("".join(f"{row}\n" for row in rows))
            step += 300
            found.refresh()

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        with found.lock:
            if "loss" in found.columns:
                steps, values = thinned(found.columns["loss"], 50)
                assert len(steps) == len(values)
    writer.join()
    assert found.num_broken == 0
