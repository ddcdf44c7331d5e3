"""Rows a second of encoding, by one process on one core and by several, and what they cost.

    .venv/bin/python benchmarks/encode_processes.py [--rows 20000] [--processes 2] [--repetitions 3]

The machine may be shared, so that wall seconds say little. CPU seconds say what matters: ``n``
processes on ``n`` free cores encode as many times as many rows per second as one process on one
core as the CPU seconds of one process are of those of the busiest of them. Each sample is a fresh
process with everything imported and an empty cache; the CPU seconds that the others take to start
are given apart. All caches are equal to the byte, or the benchmark stops.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import inputs
import measure
import peers
import psutil
from measure import say

from surefoot.data.store import _shards
from surefoot.data.store._shares import Shares
from surefoot.data.training_data import prepare
from surefoot.recipe.recipe import load
from surefoot.recipe.recipe_data import encoding_of, open_codec

RECIPE = """\
model: {{path: {inputs}}}
data: {{dataset_dir: {inputs}, datasets: [rows], template: chatml, cutoff_len: 512}}
method: full
stage: sft
train: {{output_dir: {inputs}/run, max_steps: 1}}
optim: {{adamw: {{learning_rate: 1.0e-4}}}}
"""


class Measured(Shares):
    """They are waited for, and their CPU seconds are read before they work and afterwards."""

    started: list[float]
    worked: list[float]

    def are_ready(self) -> bool:
        """Whether they are; waits until then."""
        while not (is_ready := super().are_ready()) and self._count:
            time.sleep(0.05)
        if is_ready:
            self.started = [cpu(child.process.pid) for child in self._children]
        return is_ready

    def __exit__(self, *_: object) -> None:
        self.worked = [cpu(child.process.pid) for child in self._children]
        super().__exit__()


def cpu(pid: int) -> float:
    """User and system seconds of a process."""
    return sum(psutil.Process(pid).cpu_times()[:2])


def encode(folder: Path, num_processes: int) -> None:
    """One sample, on standard output: the seconds of this process and of each beside it."""
    recipe = load(folder / "recipe.yaml")
    encoding = encoding_of(recipe, open_codec(recipe, folder))
    made: list[Measured] = []

    def shares(dataset: _shards.ShardedDataset) -> Shares:
        start = encoding.start_share
        assert start is not None
        made.append(
            Measured(
                lambda number, count: start("rows", number, count),
                "rows",
                dataset.fingerprint,
                num_processes,
                0.0,
            )
        )
        return made[0]

    _shards.ShardedDataset._shares = shares  # type: ignore[method-assign, assignment]
    before = cpu(os.getpid())
    data = prepare(encoding)
    sample = {"rows": len(data.train), "here": cpu(os.getpid()) - before}
    if num_processes > 1:
        sample["starts"], ends = made[0].started, made[0].worked
        sample["beside"] = [end - start for start, end in zip(sample["starts"], ends, strict=True)]
    sample["content"] = hashlib.sha256(data.train.fingerprint.encode()).hexdigest()
    print(json.dumps(sample))


def taken(folder: Path, num_processes: int) -> dict[str, object]:
    """A sample of a fresh process; a single one gets one core."""
    with tempfile.TemporaryDirectory() as caches:
        command = [sys.executable, __file__, "--sample", folder, "--processes", num_processes]
        pinned = ["taskset", "-c", "0"] if num_processes == 1 else []
        text = subprocess.run(
            [*pinned, *map(str, command)],
            env=peers.surroundings(Path(caches)),
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
    return dict(json.loads(text.splitlines()[-1]))


def main() -> None:
    """Make the inputs, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--sample", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sample:
        encode(options.sample, options.processes)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs.make_model(folder, inputs.make_dataset(folder, options.rows))
        (folder / "recipe.yaml").write_text(RECIPE.format(inputs=folder))
        print(measure.machine())
        alone, several = [], []
        for number in range(options.repetitions):
            say(f"{number + 1}/{options.repetitions}")
            alone.append(taken(folder, 1))
            several.append(taken(folder, options.processes))
    assert len({sample["content"] for sample in alone + several}) == 1
    busiest = [max(sample["here"], *sample["beside"]) for sample in several]
    whole = [sample["here"] + sum(sample["beside"]) for sample in several]
    rows = [
        ["one process on one core", measure.spread([s["here"] for s in alone])],
        [f"{options.processes} processes and this one, in all", measure.spread(whole)],
        ["the busiest of them", measure.spread(busiest)],
        ["this one", measure.spread([s["here"] for s in several])],
        ["a start", measure.spread([x for s in several for x in s["starts"]])],
    ]
    print(measure.table([f"{options.rows:,} rows", "CPU s"], rows))
    # This process works beside the others, on one of their cores.
    ideal = [max(b, w / options.processes) for b, w in zip(busiest, whole, strict=True)]
    gains = [one["here"] / many for one, many in zip(alone, ideal, strict=True)]
    print(f"times as many rows/s on {options.processes} cores: {measure.spread(gains)}")
    print(f"after: {measure.machine()}")


if __name__ == "__main__":
    main()
