"""How much of a run's CPU time and disk the figures of each step and each row take.

    .venv/bin/python benchmarks/row_metrics.py [RECIPE] [--steps 60] [--log-steps 20]

The goal is 0.5 % of a step. CPU seconds of the thread inside what records them, beside those inside
the forward and backward pass and the update, of one run: other programs slow both alike.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from measure import machine, say

from surefoot import train
from surefoot.training import losses
from surefoot.training.callbacks.step_files import ROWS, STEPS, StepFiles
from surefoot.training.trainer import Trainer
from surefoot.training.windows import Windows

RECORDING = [
    (losses, "means_of_rows", "sums by row"),
    (Windows, "row_groups", "which rows they are"),
    (StepFiles, "add", "kept until a log"),
    (StepFiles, "flush", "files"),
]


def main() -> None:
    """Train, and print the seconds of each part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="?", default="examples/quickstart.yaml")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--log-steps", type=int, default=20)
    options = parser.parse_args()
    print(machine())
    torch.set_num_threads(1)
    seconds: Counter[str] = Counter()

    def measured(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                seconds[name] += time.thread_time() - began

        return run

    patches = [patch.object(o, n, measured(getattr(o, n), t)) for o, n, t in RECORDING]
    patches.append(patch.object(Trainer, "_turn", measured(Trainer._turn, "step")))
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for each in patches:
            each.start()
        say("training")
        steps = {"train.max_steps": options.steps, "train.log_steps": options.log_steps}
        train(options.recipe, **{**steps, "train.output_dir": folder})
        for each in patches:
            each.stop()
        sizes = {name: (Path(folder) / name).stat().st_size for name in (STEPS, ROWS)}
    total = seconds.pop("step")
    print(f"{total / options.steps * 1e3:.2f} CPU ms a step")
    for name, spent in seconds.items():
        print(f"{name}: {spent / options.steps * 1e6:.0f} us a step, {spent / total:.3%}")
    print(f"together {sum(seconds.values()) / total:.3%}; bytes: {sizes}")


if __name__ == "__main__":
    main()
