"""Losses of one full fine-tuning run with weights and products of different precision.

    .venv/bin/python benchmarks/precision.py [--steps 200] [--rate 1e-4]

The bundled model (1.2 M parameters) is trained on the bundled orders: the same examples in the same
order for all. Figures are means of the loss over 20 steps, which end at the step of their column.
float8 needs torchao, and is emulated on a CPU. On a GPU the same command measures the GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from measure import say

import surefoot

EXAMPLES = Path(__file__).parent.parent / "examples"
EVERY = 20  # steps
BF16 = {"dtype": "bfloat16"}
# name: model, optim, train
VARIANTS: Mapping[str, tuple[Mapping[str, object], Mapping[str, object], Mapping[str, object]]] = {
    "float32 weights, fp32": ({}, {}, {"precision": "fp32"}),
    "float32 weights, bf16": ({}, {}, {"precision": "bf16"}),
    "bfloat16 weights, `stochastic`": (BF16, {"bf16_weights": "stochastic"}, {"precision": "bf16"}),
    "bfloat16 weights, `master`": (BF16, {"bf16_weights": "master"}, {"precision": "bf16"}),
    "bfloat16 weights, `nearest`": (BF16, {"bf16_weights": "nearest"}, {"precision": "bf16"}),
    "float32 weights, bf16, float8 `rowwise`": (
        {"float8": "rowwise"},
        {},
        {"precision": "bf16"},
    ),
}


def losses(name: str, steps: int, rate: float, folder: Path) -> list[float]:
    """The mean loss of every ``EVERY`` steps of a variant."""
    model, optim, train = VARIANTS[name]
    run = folder / str(list(VARIANTS).index(name))
    surefoot.train(
        {
            "model": {"path": str(EXAMPLES / "base-model"), **model},
            "data": {
                "dataset_dir": str(EXAMPLES / "data"),
                "datasets": ["orders_train"],
                "cutoff_len": 256,
                "cache_dir": str(folder / "cache"),
            },
            "method": "full",
            "stage": "sft",
            "optim": {"adamw": {"learning_rate": rate, "warmup_ratio": 0.03, **optim}},
            "train": {
                "output_dir": str(run),
                "max_steps": steps,
                "global_batch_size": 8,
                "micro_batch_size": 8,
                "log_steps": EVERY,
                **train,
            },
            "checkpoint": {"save_steps": None},
        }
    )
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def main() -> None:
    """Train all variants, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--only", default="", help="variants whose name contains this")
    options = parser.parse_args()
    shown = [step for step in (20, 60, 100, 200, 500, 1000) if step <= options.steps]
    print("| | " + " | ".join(f"step {step}" for step in shown) + " |")
    print("| --- |" + " --- |" * len(shown))
    with tempfile.TemporaryDirectory() as folder:
        for name, (model, _, _) in VARIANTS.items():
            if options.only not in name or ("float8" in model and not find_spec("torchao")):
                continue
            say(name)
            found = losses(name, options.steps, options.rate, Path(folder))
            cells = " | ".join(f"{found[step // EVERY - 1]:.4f}" for step in shown)
            print(f"| {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
