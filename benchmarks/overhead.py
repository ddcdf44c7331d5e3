"""What of a step is neither forward, backward nor optimizer, for a model of about 100 M parameters.

    .venv/bin/python benchmarks/overhead.py [--repetitions 3] [--steps 6] [--threads 1]

``surefoot bench`` takes the step of ``surefoot train`` apart: laying out the batch (``data``),
forward, backward, optimizer (normalising and clipping included), and everything else (``rest``:
seeds, figures, callbacks, signals). Each repetition is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import inputs
import measure
import torch
from measure import say

SIZES = {"hidden": 768, "layers": 12, "vocabulary": 32_000}
METHODS = {"full": "full", "lora": {"lora": {"rank": 8}}}
PHASES = ("data", "forward", "backward", "optimizer", "rest")


def figures(folder: Path, method: str, steps: int) -> Any:
    """Of some steps, in a fresh process."""
    recipe = {
        "model": {"path": str(folder)},
        "data": {"dataset_dir": str(folder), "datasets": ["rows"], "template": "chatml"},
        "method": METHODS[method],
        "stage": "sft",
        "train": {
            "output_dir": str(folder / "run"),
            "global_batch_size": 4,
            "micro_batch_size": 2,
        },
        "optim": "adamw",
    }
    file = folder / f"{method}.yaml"
    file.write_text(json.dumps(recipe))  # which is YAML, too
    command = [sys.executable, "-m", "surefoot", "bench", str(file), "--steps", str(steps)]
    return json.loads(subprocess.check_output([*command, "--json"]))


def main() -> None:
    """Measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)
    print(measure.machine(), measure.versions("surefoot", "torch", "transformers"), sep="\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs.make_model(folder, inputs.make_dataset(folder, 200), **SIZES)
        rows = []
        for method in options.methods:
            found = []
            for _ in range(options.repetitions):
                say(method)
                found.append(figures(folder, method, options.steps))
            shares = [[f"{100 * one['shares'][phase]:.2f}" for one in found] for phase in PHASES]
            outside = [100 * (one["shares"]["data"] + one["shares"]["rest"]) for one in found]
            seconds = measure.spread([one["step_seconds"] for one in found])
            rows.append([method, seconds, *map(" / ".join, shares), measure.spread(outside)])
        head = ["", "seconds a step", *(f"{phase} %" for phase in PHASES), "data and rest %"]
        print(f"\n{measure.table(head, rows)}\n\nafter: {measure.machine()}")


if __name__ == "__main__":
    main()
