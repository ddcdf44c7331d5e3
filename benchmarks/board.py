"""The board: start, first paint, bytes, live latency, 200 runs, a million points.

    python benchmarks/board.py

Needs chromium for what a browser shows. Runs are folders as training leaves them.
"""

import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from board import browser
from board.runs import COMPLETE, write_run
from board.serving import Server

ROUNDS = 5
POINTS = 1_000_000


def main():
    """Measure all of it."""
    root = Path(tempfile.mkdtemp(prefix="board"))
    try:
        for number in range(200):
            write_run(root / f"runs/run-{number:03}", steps=500, end=COMPLETE)
        write_run(root / "long", steps=POINTS, end=COMPLETE)
        servers = [started(root) for _ in range(ROUNDS)]
        show("start until it listens, wall s", [one.seconds for one in servers])
        show("start, first page and table of 201 runs, CPU s", [first(one) for one in servers])
        for one in servers[1:]:
            one.close()
        over_http(servers[0])
        if browser.MISSING:
            print(browser.MISSING)
        else:
            in_a_browser(servers[0], root)
        servers[0].close()
    finally:
        shutil.rmtree(root)


def started(root):
    """A board that listens."""
    return Server(root)


def first(server):
    """Processor seconds until the first table is there."""
    httpx.get(server.address)
    httpx.get(f"{server.address}api/runs", timeout=60)
    return server.cpu_seconds


def over_http(server):
    """Answers of the server."""

    def get(path, **query):
        began = time.perf_counter()
        answer = httpx.get(f"{server.address}api/{path}", params=query, timeout=120)
        assert answer.status_code == 200, answer.text
        return time.perf_counter() - began, len(answer.content)

    show("table of 201 runs again, s", [get("runs")[0] for _ in range(ROUNDS)])
    curve = {"run": "long", "names": "loss", "points": 1200}
    print(f"{POINTS:,} points, read for the first time: {get('series', **curve)[0]:.2f} s")
    show("the same again, s", [get("series", **curve)[0] for _ in range(ROUNDS)])
    show("the same, smoothed, s", [get("series", smooth=8, **curve)[0] for _ in range(ROUNDS)])
    print(f"bytes of that curve: {get('series', **curve)[1]:,}")
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    print(next(line for line in status.splitlines() if line.startswith("VmRSS")))


def in_a_browser(server, root):
    """What a browser paints, and how soon."""
    page = browser.Browser()
    try:
        for name in ("runs", "run?run=runs/run-000", "new", "data", "chat"):
            paints, sizes = zip(*[painted(page, server, name) for _ in range(ROUNDS)], strict=True)
            show(f"#/{name}: first contentful paint, ms", paints)
            print(f"#/{name}: {sizes[0][0]:,} bytes without data, {sizes[0][1]:,} of data")
        show("a line of metrics.jsonl until the curve has it, s", live(page, server, root))
    finally:
        page.close()


def painted(page, server, name):
    """Milliseconds to the first paint, and bytes of the page and of its data."""
    page.open("about:blank")
    page.cdp("Network.clearBrowserCache")
    page.open(f"{server.address}#/{name}")
    page.wait("return document.querySelector('#main h1')")
    page.wait("return performance.getEntriesByName('first-contentful-paint').length")
    page.run("return new Promise(done => setTimeout(done, 800))")
    return page.run(
        "const all = performance.getEntriesByType('resource');"
        "const sum = (is) => all.filter(is).reduce((n, e) => n + e.decodedBodySize, 0);"
        "const own = performance.getEntriesByType('navigation')[0].decodedBodySize;"
        "return [performance.getEntriesByName('first-contentful-paint')[0].startTime,"
        " [own + sum(e => e.name.includes('/static/')), sum(e => e.name.includes('/api/'))]]"
    )


def live(page, server, root):
    """Seconds from a line in the file to the curve."""
    run = root / "runs/run-001"
    page.open("about:blank")
    page.open(f"{server.address}#/run?run=runs/run-001")
    page.wait("return document.querySelectorAll('canvas').length > 3")
    shown = "return Number(document.querySelector('.chart .legend b').innerText)"
    found = []
    for number in range(2 * ROUNDS):
        value = 0.1 + number / 100
        began = time.perf_counter()
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 501 + number, "loss": value}) + "\n")
        while abs(page.run(shown) - value) > 1e-6:
            time.sleep(0.01)
        found.append(time.perf_counter() - began)
        time.sleep(1)
    return found


def show(name, values):
    """Median, smallest and largest."""
    low, high = min(values), max(values)
    print(f"{name}: {statistics.median(values):.3g} ({low:.3g} - {high:.3g})")


if __name__ == "__main__":
    main()
