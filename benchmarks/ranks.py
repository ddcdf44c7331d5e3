"""What several processes need to save one checkpoint, beside PyTorch's distributed checkpoints.

    .venv/bin/python benchmarks/ranks.py [--folder DIR] [--repetitions 3] [--layers 12]

The state is a Qwen2 of some 89 million parameters in float32 with its Adam moments: 1.07 GB. It is
cut by rows, as FSDP2 does; by rows and columns, as tensor parallelism does; or the same in every
process, as in plain data parallelism. Subjects take turns; each of their rounds is a fresh set of
processes, of which the second save counts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from measure import interleaved, machine, ratio, say, spread, table, versions

SUBJECT = Path(__file__).parent / "savers" / "joint.py"
SUBJECTS = {
    "full": "Surefoot, layout full",
    "distributed": "Surefoot, layout distributed",
    "full_waiting": "Surefoot, layout full, waiting",
    "dcp": "dcp.save",
    "dcp_thread": "dcp.async_save, thread",
    "dcp_process": "dcp.async_save, process",
}
CUTS = {"rows": "cut by rows", "columns": "cut by rows and columns", "copies": "copies"}
Figures = dict[str, float]


def saved(name: str, cut: str, count: int, options: argparse.Namespace) -> Figures:
    """One round of one subject: the slowest process's times, and all bytes."""
    folder = options.folder / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    subprocess.run(["sync"], check=True)
    meeting = folder.with_suffix(".meeting")
    meeting.unlink(missing_ok=True)
    base = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, SUBJECT, name, cut, folder, str(options.layers)],
            env={**base, "MEETING": f"{meeting.absolute()} {rank} {count}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    told = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit(f"{name} failed")
    found = [json.loads(text.splitlines()[-1]) for text in told]
    shutil.rmtree(folder)
    figures = {key: max(one[key] for one in found) for key in ("stall", "seconds", "bytes")}
    shares = [one["share"] for one in found]
    return {**figures, "largest": max(shares) * count / max(sum(shares), 1)}


def report(found: dict[str, list[Figures]]) -> str:
    """A table of one cut and number of processes."""
    rows = []
    for name, title in SUBJECTS.items():
        if rounds := found[name]:
            column = {key: [one[key] for one in rounds] for key in rounds[0]}
            largest = f"{max(column['largest']):.3f}" if column["largest"][0] else ""
            peer = [one["seconds"] for one in found["dcp"]] or column["seconds"]
            rows.append(
                [
                    title,
                    spread(column["stall"]),
                    spread(column["seconds"]),
                    ratio(column["seconds"], peer),
                    f"{column['bytes'][0] / 1e9:.3f}",
                    largest,
                ]
            )
    head = ["saver", "stops training, s", "on the disk after, s", "of dcp.save's speed", "GB"]
    return table([*head, "largest share of the mean"], rows)


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark-ranks"))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--only", nargs="*", choices=CUTS, default=list(CUTS))
    parser.add_argument("--subjects", nargs="*", choices=SUBJECTS, default=list(SUBJECTS))
    options = parser.parse_args()
    print(f"{machine()}; {versions('surefoot', 'torch')}")
    for cut in options.only:
        for count in options.processes:
            found: dict[str, list[Figures]] = {name: [] for name in SUBJECTS}
            for name in interleaved(options.subjects, options.repetitions):
                say(f"{cut}, {count} processes: {name}")
                found[name].append(saved(name, cut, count, options))
            print(f"\n## {count} processes, {CUTS[cut]}\n\n{report(found)}")


if __name__ == "__main__":
    main()
