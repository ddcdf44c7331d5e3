"""What quantized exports of a run lose, and the memory of calibrating a random model.

    .venv/bin/python benchmarks/quantize.py quality runs/quickstart/checkpoint-200
    .venv/bin/python benchmarks/quantize.py memory --layers 3,12

The quality is what `surefoot export` prints, and the divergence of the artefact's probabilities
from the checkpoint's on the rows that the run has held out, in nats per token. Memory is the
peak of the resident set of a process that exports; the rows are random. Without calibration it is
that of Python, torch, transformers and the blocks that are copied.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from inputs import make_qwen3
from measure import machine

SCHEMES = {
    "fp8": ["rtn"],
    "w8a8": ["rtn", "gptq"],
    "w4a16": ["rtn", "gptq"],
}
EXPORT = """
import random, sys
from surefoot.plugins.quantize import export
from surefoot.plugins.quantize.target import QuantizedFolder
from surefoot.use import export as write
path, out, algorithm, count, length = sys.argv[1:]
length, rows = int(length), range(int(count))
export.calibration_rows = lambda *_: [random.choices(range(1000), k=length) for _ in rows]
write(path, out, QuantizedFolder(quantize="w4a16", algorithm=algorithm))
print(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])
"""


def held_out_ids(run: Path) -> list[list[int]]:
    """The token ids of the rows that the run was not trained on."""
    from surefoot.run.parts import RunParts
    from surefoot.use.evaluation import encoded, held_out
    from surefoot.use.model_loading import codec_of, find_parts

    folders = find_parts(run)
    parts = RunParts.around(folders.recipe, codec_of(folders), folders.model)
    sources = held_out(parts)
    items = [i for each in sources for i in encoded(parts.stage, each.examples, parts.codec)]
    return [list(map(int, item["input_ids"])) for item in items]


def divergence(folder: Path, run: Path) -> float:
    """Of all tokens of the held-out rows."""
    import torch
    from transformers import AutoModelForCausalLM

    from surefoot.use import open_model

    plain, total, count = open_model(run, dtype="float32").model, 0.0, 0
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for row in held_out_ids(run):
            ids = torch.tensor([row])
            ours, theirs = (m(ids).logits[0].double().log_softmax(-1) for m in (model, plain))
            total += float((theirs.exp() * (theirs - ours)).sum())
            count += len(row)
    return total / count


def quality(run: Path, group_sizes: list[int]) -> None:
    """A row for each scheme and algorithm."""
    from surefoot.plugins.quantize.target import QuantizedFolder
    from surefoot.use import export
    from surefoot.use.exporting.verification import verify_export

    print("| weights | algorithm | CPU s | loss of fixed texts | equal tokens | divergence |")
    print("| --- | --- | --- | --- | --- | --- |")
    root = Path(tempfile.mkdtemp(prefix="quantize-"))
    try:
        for scheme, algorithms in SCHEMES.items():
            for size in group_sizes if scheme == "w4a16" else [None]:
                for algorithm in algorithms:
                    out, start = root / f"{scheme}-{size}-{algorithm}", time.process_time()
                    groups = None if size is None else str(size)
                    wanted = {"quantize": scheme, "group_size": groups, "algorithm": algorithm}
                    export(run, out, QuantizedFolder(**wanted))
                    seconds, found = time.process_time() - start, verify_export(out).figures
                    name = scheme if size is None else f"{scheme}, groups of {size}"
                    print(
                        f"| {name} | {algorithm} | {seconds:.1f} | {found['loss']:.4f} | "
                        f"{found['equal_tokens'] / found['compared_tokens']:.2%} | "
                        f"{divergence(out, run):.5f} |",
                        flush=True,
                    )
        print(f"The checkpoint: a loss of {found['checkpoint_loss']:.4f}.")
    finally:
        shutil.rmtree(root)


def memory(layers: list[int], rows: int, length: int) -> None:
    """A row for each depth and algorithm."""
    print("| layers | file MB | algorithm | wall s | peak MB |\n| --- | --- | --- | --- | --- |")
    for count in layers:
        root = Path(tempfile.mkdtemp(prefix="quantize-"))
        try:
            sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": count}
            size = 2 * make_qwen3(root / "model", **sizes) / 1e6
            for algorithm in ("rtn", "gptq"):
                given = [root / "model", root / algorithm, algorithm, str(rows), str(length)]
                start = time.perf_counter()
                done = subprocess.run(
                    [sys.executable, "-c", EXPORT, *given],
                    stdout=subprocess.PIPE,
                    check=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
                wall, peak = time.perf_counter() - start, int(done.stdout.split()[-1]) * 1024 / 1e6
                print(
                    f"| {count} | {size:.0f} | {algorithm} | {wall:.0f} | {peak:.0f} |", flush=True
                )
        finally:
            shutil.rmtree(root)


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    found = commands.add_parser("quality")
    found.add_argument("run", type=Path)
    found.add_argument("--group-sizes", default="32,128")
    found = commands.add_parser("memory")
    found.add_argument("--layers", default="3,12")
    found.add_argument("--rows", type=int, default=16)
    found.add_argument("--length", type=int, default=128)
    given = parser.parse_args()
    print(machine())
    if given.command == "quality":
        quality(given.run, [int(one) for one in given.group_sizes.split(",")])
    else:
        memory([int(one) for one in given.layers.split(",")], given.rows, given.length)


if __name__ == "__main__":
    main()
