"""What the device reaches: a large product of random matrices in bfloat16, and a copy in memory.

python benchmarks/gpu/gemm_case.py TASK.json
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from surefoot.use.bench import gemm_flops

DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
COPIED = {"cuda": 4 * 2**30, "cpu": 2**24}  # bytes
REPETITIONS = {"cuda": 30, "cpu": 3}


def seconds(work: Callable[[], object], device: str) -> float:
    """The median of some repetitions, after a few that warm up."""
    found = []
    for turn in range(3 + REPETITIONS[device]):
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        if turn >= 3:
            found.append(time.perf_counter() - began)
    return median(found)


def main() -> None:
    """Measure, and leave the report."""
    todo = json.loads(Path(sys.argv[1]).read_text())
    device = todo["device"]
    source = torch.ones(COPIED[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    report = {
        "tflops": gemm_flops(DTYPES[device], torch.device(device)) / 1e12,
        "copy_gb_s": 2 * COPIED[device] / seconds(lambda: target.copy_(source), device) / 1e9,
    }
    Path(todo["report"]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
