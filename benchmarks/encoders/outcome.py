"""What an encoder reports: seconds from the rows' file to a dataset that training can read.

An encoder is a program of its own, so that each is timed in a fresh process; the clock starts with
everything imported and the tokenizer loaded. Its arguments: folder with model and rows, cutoff_len,
file for the report, and ``dump`` where the report is to hold every id and label as well.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np

T = TypeVar("T")
Item = tuple[Sequence[int], Sequence[int]]  # input_ids, labels


@dataclass(frozen=True)
class Task:
    """The arguments of an encoder."""

    inputs: Path
    cutoff_len: int
    report: Path
    should_dump: bool

    def run(self, encode: Callable[[], T], items: Callable[[T], Iterable[Item]]) -> None:
        """Time ``encode`` and report; ``items`` gives what came of every row."""
        wall, cpu = time.monotonic(), sum(os.times()[:4])
        dataset = encode()
        seconds = {"wall": time.monotonic() - wall, "cpu": sum(os.times()[:4]) - cpu}
        self.report.write_text(json.dumps(seconds))
        if self.should_dump:
            _dump(self.report.with_suffix(".npz"), items(dataset))


def task() -> Task:
    """Read the arguments."""
    inputs, cutoff_len, report, *rest = sys.argv[1:]
    return Task(Path(inputs), int(cutoff_len), Path(report), rest == ["dump"])


def _dump(path: Path, items: Iterable[Item]) -> None:
    ids, labels = zip(*items, strict=True)
    np.savez(
        path,
        ids=np.fromiter(chain.from_iterable(ids), np.int32),
        labels=np.fromiter(chain.from_iterable(labels), np.int32),
        offsets=np.cumsum([0, *map(len, ids)]),
    )
