"""Time, memory and size of an export to GGUF, of a random Qwen3 of 0.5 B parameters.

    .venv/bin/python benchmarks/gguf_export.py --repetitions 1

Every export is a process of its own. Memory is the peak of its resident set; the same process
importing everything and exporting a tiny model shows what of it is Python, torch and transformers.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from inputs import make_qwen3
from measure import machine

EXPORT = """
import sys
from surefoot.plugins.gguf.targets import GGUF
from surefoot.use import export
export(sys.argv[1], sys.argv[2], GGUF(quantize=sys.argv[3]))
print(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])
"""
SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 24}
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}


def measure(folder: Path, out: Path, quantize: str) -> dict[str, float]:
    """Seconds (wall, CPU), peak MB and MB on the disk of one export."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-c", EXPORT, folder, out, quantize]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    found = {
        "wall": wall,
        "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak": int(done.stdout.split()[-1]) * 1024 / 1e6,
        "size": out.stat().st_size / 1e6,
    }
    for path in out.parent.glob(f"{out.stem}.*"):
        path.unlink()
    return found


def main() -> None:
    """Export to every format in turn; print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--formats", default="f16,q8_0,q6_k,q5_k_m,q4_k_m")
    arguments = parser.parse_args()
    print(machine())
    root = Path(tempfile.mkdtemp(prefix="gguf-"))
    try:
        make_qwen3(root / "tiny", **TINY)
        millions = make_qwen3(root / "model", **SIZES) / 1e6
        floor = measure(root / "tiny", root / "a.gguf", "f16")
        print(f"{millions:.0f} M parameters; without the weights {json.dumps(floor)}")
        print("| format | wall s | CPU s | peak MB | file MB |\n| --- | --- | --- | --- | --- |")
        for name in arguments.formats.split(","):
            runs = range(arguments.repetitions)
            found = [measure(root / "model", root / "a.gguf", name) for _ in runs]
            row = [median(one[key] for one in found) for key in ("wall", "cpu", "peak", "size")]
            print(f"| {name} | {row[0]:.1f} | {row[1]:.1f} | {row[2]:.0f} | {row[3]:.0f} |")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
