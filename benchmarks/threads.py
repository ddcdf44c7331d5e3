"""Training beside other programs: what threads that spin at OpenMP's barriers cost.

    .venv/bin/python benchmarks/threads.py [--repetitions 3] [--steps 40]

The quickstart's model with two threads, which wait as libgomp does by default, as Surefoot lets
them, and by sleeping at once; and with one thread. Beside each run are 0, 2 and 6 processes that
compute without end. Figures are tokens per second of wall time, from ``metrics.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from measure import interleaved, machine, say, spread, table, timed, versions

ROOT = Path(__file__).parents[1]
SUBJECTS = {
    "2 threads, libgomp's default": {"GOMP_SPINCOUNT": "300000"},
    "2 threads, Surefoot's": {},
    "2 threads, sleeping at once": {"GOMP_SPINCOUNT": "0"},
    "1 thread": {"OMP_NUM_THREADS": "1"},
}
NEIGHBOURS = (0, 2, 6)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Meanwhile so many other processes compute."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def speed(settings: dict[str, str], steps: int) -> float:
    """Tokens per second of one run, without its first steps."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        command = [
            sys.executable,
            "-m",
            "surefoot",
            "train",
            str(ROOT / "examples/quickstart.yaml"),
        ]
        command += [f"train.output_dir={output}", f"train.max_steps={steps}", "train.log_steps=10"]
        command += ["data.eval_datasets=[]", "train.eval_epoch=false", "checkpoint.save_steps=1000"]
        env = {"OMP_NUM_THREADS": "2", **os.environ, **settings}
        timed(command, env, Path(folder) / "log")
        lines = (output / "metrics.jsonl").read_text().splitlines()
        found = [row["tokens_per_second"] for row in map(json.loads, lines) if "loss" in row]
    return median(found[1:])


def main() -> None:
    """Measure all subjects in turns, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    say(f"{machine()}; {versions('torch')}")
    found: dict[tuple[str, int], list[float]] = {}
    for count in NEIGHBOURS:
        for name in interleaved(list(SUBJECTS), options.repetitions):
            with busy(count):
                found.setdefault((name, count), []).append(speed(SUBJECTS[name], options.steps))
    head = ["tokens/s", *(f"{count} busy neighbours" for count in NEIGHBOURS)]
    say(table(head, [[n, *(spread(found[n, c], 0) for c in NEIGHBOURS)] for n in SUBJECTS]))


if __name__ == "__main__":
    main()
