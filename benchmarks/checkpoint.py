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

from measure import interleaved, ratio, spread, table, versions

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


def report_saves(found: Results) -> None:
    """Seconds until the bytes are on the disk, and memory beyond the state."""
    rows = [
        [
            title,
            spread(column(found, name, "seconds")),
            ratio(column(found, name, "seconds"), column(found, "write", "seconds")),
            spread(column(found, name, "peak_mb"), 0),
        ]
        for name, title in SAVES.items()
    ]
    head = ["save", "seconds", "of the plain write's speed", "peak extra MB"]
    print(f"\n## Save\n\n{table(head, rows)}")


def report_loads(found: Results) -> None:
    """Seconds into tensors that are there, with the files in the cache."""
    rows = [
        [
            title,
            spread(column(found, name, "seconds")),
            ratio(column(found, name, "seconds"), column(found, "read", "seconds")),
            spread(column(found, name, "peak_mb"), 0),
        ]
        for name, title in LOADS.items()
    ]
    head = ["load, cache warm", "seconds", "of preadv's speed", "peak extra MB"]
    print(f"\n## Load\n\n{table(head, rows)}")


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
    print(f"\n## Training while a save is written\n\n{table(head, rows)}")


def report_copies(found: Results) -> None:
    """Converting a folder of weights, beside `cp` of the same bytes."""
    rows = [
        [
            title,
            spread(column(found, name, "seconds")),
            ratio(column(found, name, "seconds"), column(found, "cp", "seconds")),
            spread(column(found, name, "peak_mb"), 0),
        ]
        for name, title in COPIES.items()
    ]
    head = ["copy, cache warm, fsync", "seconds", "of cp's speed", "peak extra MB"]
    print(f"\n## Copy\n\n{table(head, rows)}")


def report_merges(found: Results) -> None:
    """Whole tensors from the boxes of eight processes, beside `cp` of the same bytes."""
    rows = [
        [
            title,
            spread(column(found, name, "seconds")),
            ratio(column(found, name, "seconds"), column(found, "cp", "seconds")),
            spread(column(found, name, "peak_mb"), 0),
        ]
        for name, title in MERGES.items()
    ]
    head = ["merge, cache warm, fsync", "seconds", "of cp's speed", "peak extra MB"]
    print(f"\n## Merge\n\n{table(head, rows)}")


REPORTS = {
    "saving": (SAVES, report_saves),
    "loading": (LOADS, report_loads),
    "training": (LOOPS, report_loops),
    "copying": (COPIES, report_copies),
    "merging": (MERGES, report_merges),
}


def main() -> None:
    """Measure what was asked for and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark-checkpoint"))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--only", nargs="*", choices=REPORTS, default=list(REPORTS))
    options = parser.parse_args()
    print(f"{versions('surefoot', 'torch', 'transformers', 'safetensors')}")
    for kind in options.only:
        subjects, report = REPORTS[kind]
        report(measured(kind, list(subjects), options))
    shutil.rmtree(options.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
