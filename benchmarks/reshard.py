"""What it costs to go from 8 processes to 1, to 4, and from 1 to 8, beside the peers and `cp`.

    .venv/bin/python benchmarks/reshard.py [--folder DIR] [--repetitions 3] [--size 2.0]
        [--mindspore DIR/bin/python]

A Llama's weights in float32, --size gigabytes of them, cut by rows, or also by columns where tensor
parallelism does. Every conversion runs in a process of its own, its source not in the page cache,
its result flushed; the subjects take turns. Memory is the anonymous memory of the process and its
children beyond what it had before it began; bytes read are those that came from the disk.
MindSpore's are left out without --mindspore, the Python of an environment made from
requirements-mindspore.txt. Saves by several processes are measured elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
from measure import interleaved, machine, ratio, say, spread, table, versions

SUBJECTS = Path(__file__).parent / "savers"
OURS = "surefoot_checkpoint"
TASKS = {
    "merge": ("8 to 1, cut by rows", ["cp", "surefoot", OURS, "dcp", "mindspore"]),
    "merge_columns": ("8 to 1, cut by rows and columns", ["cp", "surefoot", "dcp", "mindspore"]),
    "reshard": ("8 to 4, by rows", ["cp", "surefoot", OURS, "mindspore"]),
    "split": ("1 to 8, by rows", ["cp", "surefoot", OURS, "mindspore"]),
    "mindspore": ("Hugging Face to MindSpore, whole", ["cp", "to_mindspore", "from_mindspore"]),
    "load": ("8 to 1, into tensors", [OURS, "dcp", "dcp_columns"]),
}
TITLES = {
    "cp": "`cp -r`",
    "surefoot": "Surefoot, boxes as PyTorch has them",
    OURS: "Surefoot, a checkpoint, every hash checked and made",
    "dcp": "PyTorch DCP",
    "dcp_columns": "PyTorch DCP, cut by rows and columns",
    "mindspore": "MindSpore",
    "to_mindspore": "Surefoot, to MindSpore's names and files",
    "from_mindspore": "Surefoot, back from them",
}
POLL_SECONDS = 0.02

Results = dict[str, list[dict[str, float]]]


def python(subject: str, options: argparse.Namespace) -> list[str | Path]:
    """The command that runs a subject's script."""
    if subject == "mindspore":
        return [options.mindspore, SUBJECTS / "resharding_mindspore.py"]
    return [sys.executable, SUBJECTS / "resharding.py"]


def environment() -> dict[str, str]:
    """Of every subject."""
    return {**os.environ, "PYTHONWARNINGS": "ignore", "GLOG_v": "3"}


def make(sources: Path, options: argparse.Namespace) -> None:
    """What is converted, once."""
    for subject in ("surefoot", "mindspore") if options.mindspore else ("surefoot",):
        say(f"writing {options.size:g} GB, cut in several ways, for {subject}")
        command = [*python(subject, options), "make", sources, str(options.size * 1e9)]
        subprocess.run(command, env=environment(), check=True, stdout=subprocess.DEVNULL)


def converted(
    task: str, subject: str, sources: Path, options: argparse.Namespace
) -> dict[str, float]:
    """What one conversion cost."""
    target = options.folder / "out"
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["sync"], check=True)
    command = [*python(subject, options), task, subject, sources, target]
    log = options.folder / "log"
    with log.open("w") as errors:
        child = subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert child.stdout is not None
    for line in child.stdout:
        if line == "ready\n":
            break
    before = peak = _anonymous(child.pid)
    while child.poll() is None:
        peak = max(peak, _anonymous(child.pid))
        time.sleep(POLL_SECONDS)
    if child.returncode:
        raise SystemExit(f"{task} {subject}: {log.read_text()[-3000:]}")
    told: dict[str, float] = json.loads(child.stdout.read().splitlines()[-1])
    shutil.rmtree(target, ignore_errors=True)
    return {**told, "peak_mb": (peak - before) / 1e6}


def _anonymous(pid: int) -> int:
    """Bytes of memory that is not a file's, of a process and its children."""
    total = 0
    try:
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for process in tree:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            total += sum(int(x.split()[1]) for x in lines if x.startswith("RssAnon")) * 1024
    except (psutil.NoSuchProcess, OSError):
        pass  # it has just ended
    return total


def report(task: str, found: Results) -> None:
    """A table of one task."""
    base = "cp" if "cp" in found else OURS
    rows = []
    for subject, costs in found.items():
        columns = {key: [one[key] for one in costs] for key in costs[0]}
        theirs = {key: [one[key] for one in found[base]] for key in costs[0]}
        rows.append(
            [
                TITLES[subject],
                spread(columns["seconds"]),
                ratio(columns["seconds"], theirs["seconds"]),
                spread(columns["cpu"]),
                spread(columns["read_mb"], 0),
                spread(columns["peak_mb"], 0),
            ]
        )
    speed = "of cp's speed" if base == "cp" else "of Surefoot's speed"
    head = [TASKS[task][0], "seconds", speed, "CPU seconds", "MB read", "peak extra MB"]
    print(f"\n{table(head, rows)}", flush=True)


def main() -> None:
    """Measure what was asked for and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark-reshard"))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--size", type=float, default=2.0, help="gigabytes of weights")
    parser.add_argument("--only", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--mindspore", type=Path, help="the Python of its environment")
    options = parser.parse_args()
    print(f"{machine()}; {versions('surefoot', 'torch', 'safetensors')}; {options.size:g} GB")
    shutil.rmtree(options.folder, ignore_errors=True)
    sources = options.folder / "sources"
    sources.mkdir(parents=True)
    make(sources, options)
    for task in options.only:
        subjects = [s for s in TASKS[task][1] if s != "mindspore" or options.mindspore]
        found: Results = {subject: [] for subject in subjects}
        for subject in interleaved(subjects, options.repetitions):
            say(f"{task}: {subject}")
            found[subject].append(converted(task, subject, sources, options))
        report(task, found)
    shutil.rmtree(options.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
