"""How long others wait: the server's event loop under large requests, and a board of many runs.

    .venv/bin/python benchmarks/held_up.py

Each request of ``tests/plugins/serve`` that grows without bound, and two small ones that are
answered, is sent to ``surefoot serve`` of a tiny model, which runs in a thread of this process. The
loop holds all other clients up for as long as one of its callbacks runs. CPU milliseconds of the
loop's thread say what the code needs; wall milliseconds have what other threads and other programs
take, too.
Then a board of many runs is started, and asked for its table until the table is complete.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
from measure import machine, spread, table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from folders import save_model
from plugins.board.runs import COMPLETE, write_run
from plugins.board.serving import Server
from plugins.serve.running import running
from plugins.serve.test_serving import ASKED, CHAT, LARGE, TEXT
from surefoot.data.text.templates import bundled

SMALL = [(TEXT, {"prompt": "x", "max_tokens": 1}), (CHAT, {"messages": ASKED, "max_tokens": 1})]


class Longest:
    """The longest callback of the server's event loop since the last look."""

    def __init__(self):
        self.wall = self.cpu = 0.0

    def watch(self):
        """Time every callback of the loop whose thread is the server's."""
        run = asyncio.Handle._run

        def timed(handle):
            if not threading.current_thread().name.endswith("(run)"):
                run(handle)
                return
            wall, cpu = time.perf_counter(), time.thread_time()
            run(handle)
            self.cpu = max(self.cpu, time.thread_time() - cpu)
            self.wall = max(self.wall, time.perf_counter() - wall)

        asyncio.Handle._run = timed

    def taken(self):
        """The longest in CPU and in wall milliseconds; they begin again."""
        found = 1e3 * self.cpu, 1e3 * self.wall
        self.wall = self.cpu = 0.0
        return found


def held_by_requests(folder, repetitions):
    """A row for each request: its size, its status, and the longest callback."""
    save_model(folder / "base", template=bundled()["chatml"].source)
    longest, rows = Longest(), []
    longest.watch()
    with running(folder / "base") as client:
        for path, body in SMALL:  # what is imported and made only once
            client.ok(path, **body)
        for path, body in [*SMALL, *LARGE]:
            data, found, statuses = json.dumps(body).encode(), [], set()
            for _ in range(repetitions):
                longest.taken()
                headers = {"content-type": "application/json"}
                statuses.add(client.http.post(path, content=data, headers=headers).status_code)
                found.append(longest.taken())
            cpu, wall = zip(*found, strict=True)
            status = ", ".join(map(str, sorted(statuses)))
            name = f"`{path}`: {named(body)}"
            rows.append([name, f"{len(data):,}", status, spread(cpu), spread(wall)])
    return rows


def named(body):
    """A body in a few words."""
    parts = []
    for key, value in list(body.items())[:2]:
        text = json.dumps(value)
        parts.append(f"{key} {text}" if len(text) < 30 else f"{key} of {len(text):,} characters")
    return ", ".join(parts) + (f" and {len(body) - 2:,} more" if len(body) > 2 else "")


def first_looks(folder, num_runs):
    """A row for each of the first looks at the table of a new board: wall, CPU, number of runs."""
    for number in range(num_runs):
        write_run(folder / f"runs/run-{number:04}", end=COMPLETE)
    server, rows = Server(folder), []
    try:
        for look in range(1, 4):
            began, cpu = time.perf_counter(), server.cpu_seconds
            found = httpx.get(f"{server.address}api/runs", timeout=600).json()["runs"]
            wall, cpu = time.perf_counter() - began, server.cpu_seconds - cpu
            rows.append([str(look), f"{wall:.2f}", f"{cpu:.2f}", f"{len(found):,}"])
    finally:
        server.close()
    return rows


def main():
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--runs", type=int, default=2000)
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="held-up"))
    os.environ["HF_HUB_OFFLINE"] = "1"
    print(machine())
    try:
        head = ["request", "bytes", "status", "longest callback, CPU ms", "wall ms"]
        print(table(head, held_by_requests(folder, asked.repetitions)))
        head = ["look", "wall s", "CPU s", "runs in the table"]
        print(table(head, first_looks(folder / "board", asked.runs)))
        print(machine())
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
