"""What saving and loading cost beside the peers and the limits of memory and disk.

    .venv/bin/python benchmarks/checkpoint.py [--folder DIR] [--repetitions 3] [--layers 12]

The state is a Qwen2 of some 89 million parameters in float32 with its Adam moments: 1.07 GB. Every
subject saves the same tensors; they take turns, each in a process of its own, and the limits
(memory copy, plain write, plain read) are measured in the same turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from measure import interleaved, machine, ratio, spread, table, versions

SUBJECTS = Path(__file__).parent / "savers"
SAVES = {
    "write": "plain write of a new preallocated file, fsync (limit)",
    "direct": "the same past the page cache, O_DIRECT (limit)",
    "surefoot": "Surefoot, in the background: write, hash, fsync, commit",
    "surefoot_waiting": "Surefoot, waiting",
    "torch": "torch.save, fsync",
    "safetensors": "safetensors save_file, fsync",
    "dcp": "DCP save",
    "dcp_huggingface": "DCP save, Hugging Face storage, consolidated",
    "trainer": "Hugging Face Trainer's save (not durable)",
}
LOADS = {
    "read": "preadv into touched memory (limit)",
    "surefoot": "Surefoot, every hash checked",
    "torch": "torch.load, copy_",
    "torch_mmap": "torch.load(mmap=True), copy_",
    "safetensors": "safetensors load_file, copy_",
    "dcp": "DCP load",
}
LOOPS = {
    "surefoot": "Surefoot, in the background",
    "surefoot_waiting": "Surefoot, waiting",
    "torch": "torch.save",
    "dcp_thread": "DCP async_save, thread",
    "dcp_process": "DCP async_save, process",
}
COPIES = {"cp": "cp", "surefoot": "Surefoot copy", "surefoot_cast": "Surefoot copy to bfloat16"}
MERGES = {
    "cp": "cp of the eight files",
    "surefoot": "Surefoot, DCP's boxes to one file",
    "surefoot_checkpoint": "Surefoot, a checkpoint of 8 ranks to whole, every hash checked",
    "surefoot_checkpoint_8_to_4": "Surefoot, a checkpoint of 8 ranks to 4, every hash checked",
    "dcp": "DCP's consolidation to one file",
}

MEMORY = "peak extra MB"

Results = dict[str, list[dict[str, float]]]


def measured(kind: str, subjects: Sequence[str], options: argparse.Namespace) -> Results:
    """Every subject as often as asked for, each time in a fresh process and an empty folder."""
    found: Results = {name: [] for name in subjects}
    for name in interleaved(list(subjects), options.repetitions):
        folder = options.folder / f"{kind}-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        subprocess.run(["sync"], check=True)
        command = [sys.executable, SUBJECTS / f"{kind}.py", name, folder, str(options.layers)]
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{kind} {name}: {done.stderr[-3000:]}")
        found[name].append(json.loads(done.stdout.splitlines()[-1]))
        shutil.rmtree(folder)
    return found


def column(found: Results, name: str, key: str) -> list[float]:
    """One figure of one subject, over all repetitions."""
    return [one[key] for one in found[name]]


def report_speeds(found: Results, titles: dict[str, str], limit: str, head: list[str]) -> None:
    """Seconds, the share of ``limit``'s speed, and memory beyond the state. Where others use the
    machine the seconds of the processor say more; those of a save are its writer process's."""
    costs = {"seconds": head[1:], "cpu": ["CPU seconds", "by CPU"]}
    if limit == "write":
        del costs["cpu"]
    rows = []
    for name, title in titles.items():
        row = [title]
        for key in costs:
            ours, theirs = column(found, name, key), column(found, limit, key)
            row += [spread(ours), ratio(ours, theirs)]
        rows.append([*row, spread(column(found, name, "peak_mb"), 0)])
    print(table([head[0], *(title for pair in costs.values() for title in pair), MEMORY], rows))


def report_loops(found: Results) -> None:
    """What a save takes from a training loop: at once, and until it is done."""
    rows = [
        [
            title,
            spread(column(found, name, "stall"), 3),
            spread(column(found, name, "copies")),
            spread(column(found, name, "window")),
            spread(column(found, name, "slower"), 1),
        ]
        for name, title in LOOPS.items()
    ]
    head = ["saver", "stops training, s", "in memory copies", "done after, s", "steps slower, %"]
    print(table(head, rows))


SPEEDS = {  # subjects, the one that is the limit, and what the table's columns are called
    "saving": (SAVES, "write", ["save", "seconds", "of the plain write's speed"]),
    "loading": (LOADS, "read", ["load, cache warm", "seconds", "of preadv's speed"]),
    "copying": (COPIES, "cp", ["copy, cache warm, fsync", "seconds", "of cp's speed"]),
    "merging": (MERGES, "cp", ["merge, cache warm, fsync", "seconds", "of cp's speed"]),
}
KINDS = ("saving", "loading", "training", "copying", "merging")


def main() -> None:
    """Measure what was asked for and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark-checkpoint"))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    print(machine(), versions("surefoot", "torch", "transformers", "safetensors"), sep="\n")
    for kind in options.only:
        print(f"\n## {kind.capitalize()}\n")
        if kind == "training":
            report_loops(measured(kind, list(LOOPS), options))
        else:
            subjects, limit, head = SPEEDS[kind]
            report_speeds(measured(kind, list(subjects), options), subjects, limit, head)
    shutil.rmtree(options.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
