"""The board: start, first paint, bytes, live latency, 200 runs, a million points; LLaMA Board.

    python benchmarks/board.py
    python benchmarks/board.py --llama-board benchmarks/.venv-peers/bin/llamafactory-cli

Needs chromium for what a browser shows. Runs are folders as training leaves them. The environment
of LLaMA-Factory is made by ``python -c "import peers; peers.ensure()"`` in ``benchmarks``.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import measure
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "plugins"))
from board import browser
from board.runs import COMPLETE, write_run
from board.serving import Server

ROUNDS = 5
POINTS = 1_000_000


def main():
    """Measure all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-board", help="llamafactory-cli, to measure its webui beside")
    other = parser.parse_args().llama_board
    print(measure.machine())
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
            first_look(root)
            first_form(root)
            if other:
                beside(other)
        servers[0].close()
        print(measure.machine())
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
    return page.run(PAINT), page.run(BYTES)


PAINT = "return performance.getEntriesByName('first-contentful-paint')[0].startTime"
BYTES = """
const all = performance.getEntriesByType('resource');
const sum = (is) => all.filter(is).reduce((n, e) => n + e.decodedBodySize, 0);
const own = performance.getEntriesByType('navigation')[0].decodedBodySize;
return [own + sum(e => !e.name.includes('/api/')), sum(e => e.name.includes('/api/'))];
"""
SEEN = """
window.seen = {};
performance.setResourceTimingBufferSize(5000);
const look = () => {
  if (document.querySelectorAll("input, select").length > 5) window.seen.form ||= performance.now();
  if (document.querySelector('canvas')) window.seen.curve ||= performance.now();
  requestAnimationFrame(look);
};
look();
"""


def first_form(root):
    """Milliseconds until a new page of a server shows the form of a new run."""
    server, found = started(root), []
    try:
        for _ in range(ROUNDS):
            page = browser.Browser()
            page.cdp("Page.addScriptToEvaluateOnNewDocument", source=SEEN)
            page.open(f"{server.address}#/new")
            page.wait("return window.seen.form", seconds=60)
            found.append(page.run("return window.seen.form"))
            page.close()
    finally:
        server.close()
    show("#/new: its form is there, ms", found)


def first_look(root):
    """Milliseconds until a new server and a new page show a million points."""
    found = []
    for _ in range(ROUNDS):
        server, page = started(root), browser.Browser()
        try:
            page.cdp("Page.addScriptToEvaluateOnNewDocument", source=SEEN)
            httpx.get(server.address)
            page.open(f"{server.address}#/run?run=long")
            page.wait("return window.seen.curve", seconds=120)
            found.append(page.run("return window.seen.curve"))
        finally:
            page.close()
            server.close()
    show(f"{POINTS:,} points of a new server: curves, ms", found)


def beside(command):
    """The same of LLaMA Board: its start, its first paint and its bytes."""
    rows = {"starts": [], "work": [], "paints": [], "forms": [], "bytes": []}
    names = {"GRADIO_SERVER_NAME": "127.0.0.1", "GRADIO_ANALYTICS_ENABLED": "False"}
    names |= {"DISABLE_VERSION_CHECK": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    for number in range(ROUNDS):
        address = f"http://127.0.0.1:{17860 + number}/"
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment |= {**names, "GRADIO_SERVER_PORT": str(17860 + number)}
        began, folder = time.perf_counter(), tempfile.mkdtemp(prefix="llama")
        words = [str(Path(command).absolute()), "webui"]
        options = {"cwd": folder, "env": environment, "stdout": subprocess.DEVNULL}
        process = subprocess.Popen(words, stderr=subprocess.DEVNULL, **options)
        page = browser.Browser()
        try:
            wait_for(address, process)
            rows["starts"].append(time.perf_counter() - began)
            rows["work"].append(cpu_seconds(process))
            page.cdp("Page.addScriptToEvaluateOnNewDocument", source=SEEN)
            page.open(address)
            page.wait("return window.seen.form", seconds=60)
            page.run("return new Promise(done => setTimeout(done, 2000))")
            rows["paints"].append(page.run(PAINT))
            rows["forms"].append(page.run("return window.seen.form"))
            rows["bytes"].append(page.run(BYTES)[0])
        finally:
            page.close()
            process.send_signal(signal.SIGTERM)
            process.wait(30)
            shutil.rmtree(folder, ignore_errors=True)
    show("LLaMA Board: start until it answers, wall s", rows["starts"])
    show("the same, CPU s", rows["work"])
    show("first contentful paint, ms", rows["paints"])
    show("its form is there, ms", rows["forms"])
    show("bytes of its page, not compressed", rows["bytes"])


def cpu_seconds(process):
    """Processor time of a server so far."""
    return sum(psutil.Process(process.pid).cpu_times()[:2])


def wait_for(address, process):
    """Until a server answers."""
    while process.poll() is None:
        try:
            httpx.get(address, timeout=60)
            return
        except httpx.TransportError:
            time.sleep(0.05)
    raise RuntimeError("it has ended")


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
