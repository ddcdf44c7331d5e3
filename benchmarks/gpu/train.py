"""Training on one GPU: tokens a second, model FLOP utilisation, peak memory, beside the Trainer.

    .venv/bin/pip install -r benchmarks/gpu/requirements.txt
    .venv/bin/python benchmarks/gpu/train.py [--shapes 0.5B 1.5B] [--methods full lora]

As ``benchmarks/train.py``, with models of the sizes of Qwen2's, in bf16 over weights in float32.
The Hugging Face Trainer is measured padded, and with Liger's kernels where they are installed. The
utilisation is the share of what a large product of two matrices reaches on the same GPU in bf16:
6 operations a token and weight (4 for LoRA, whose base learns nothing), attention not counted.
``--device cpu --shapes tiny`` tries out that all of it runs, without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch

sys.path[0] = str(Path(__file__).parents[1])  # this folder has a ``train`` as well

import inputs
import measure
import tokens
import train
from measure import say
from transformers import Qwen2Config

from surefoot.forecast.bench.hardware import gemm_flops, name_of

SHAPES = {  # hidden size, layers, intermediate size, vocabulary, examples a step
    "0.5B": (896, 24, 4_864, 151_936, 32),
    "1.5B": (1_536, 28, 8_960, 151_936, 16),
    "tiny": (128, 2, 352, 4_096, 4),
}
SUBJECTS = {
    "surefoot": "Surefoot",
    "trainer-padded": "Hugging Face Trainer, padded (default)",
    "trainer-liger": "Hugging Face Trainer, padded, Liger's kernels",
}
OPERATIONS = {"full": 6, "lora": 4}  # a token and weight


def prepare(folder: Path, shape: str, num_rows: int) -> None:
    """Model, rows, and the tokens that all are given."""
    hidden, layers, intermediate, vocabulary, _ = SHAPES[shape]
    rows = inputs.make_dataset(folder, num_rows)
    inputs.make_model(
        folder,
        rows,
        hidden=hidden,
        layers=layers,
        vocabulary=vocabulary,
        intermediate=intermediate,
    )
    tokens.tokenize(folder, cutoff_len=512)


def num_weights(folder: Path) -> int:
    """Elements of all matrices that tokens are multiplied by; the head counts, the embedding is
    the same one."""
    config = Qwen2Config.from_pretrained(folder)
    size, width = config.hidden_size, config.hidden_size // config.num_attention_heads
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    layer = size * (heads * width + 3 * config.intermediate_size)
    return int(config.num_hidden_layers * layer + size * config.vocab_size)


def show(bench: train.Bench, subjects: list[str], operations: float, peak: float) -> str:
    """The table of one shape and method; ``operations`` a token, ``peak`` of them a second."""
    wall = {n: [r["wall"] / r["tokens"] for r in bench.found[n]] for n in subjects}
    memory = {n: [r["peak_mb"] for r in bench.found[n]] for n in subjects}
    rows = [
        [
            SUBJECTS[name],
            measure.spread([1 / seconds for seconds in wall[name]], 0),
            measure.ratio(wall["surefoot"], wall[name]),
            f"{100 * operations / median(wall[name]) / peak:.1f}",
            measure.spread(memory[name], 0),
            measure.ratio(memory["surefoot"], memory[name]),
            f"{bench.found[name][0]['losses'][0]:.4f}",
        ]
        for name in subjects
    ]
    head = ["", "tokens a second", "times ours", "utilisation %", "peak MB", "times ours"]
    return measure.table([*head, "first loss"], rows)


def present(names: list[str], device: str) -> list[str]:
    """Who can be measured here."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU here; --device cpu --shapes tiny tries this out without one")
    has_liger = find_spec("liger_kernel") is not None and device == "cuda"
    if not has_liger and "trainer-liger" in names:
        say("Liger's kernels are not here (benchmarks/gpu/requirements.txt, and a GPU)")
    found = [name for name in names if has_liger or name != "trainer-liger"]
    return list(dict.fromkeys(["surefoot", *found]))


def main() -> None:
    """Make the inputs, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5B", "1.5B"])
    parser.add_argument("--methods", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    subjects = present(options.only, options.device)
    device, dtype = torch.device(options.device), torch.bfloat16
    peak = gemm_flops(dtype if device.type == "cuda" else torch.float32, device)
    names = ("surefoot", "torch", "transformers", "peft")
    print(measure.machine(), measure.versions(*names), sep="\n")
    print(f"{name_of(device)}, products at {peak / 1e12:.3g} TFLOP/s")
    with tempfile.TemporaryDirectory() as name:
        for shape in options.shapes:
            folder, examples = Path(name) / shape, SHAPES[shape][-1]
            prepare(folder, shape, max(1000, examples * options.steps))
            for method in options.methods:
                tolerance = 2e-3 if device.type == "cuda" else 2e-4
                bench = train.Bench(Path(name), options, examples, device.type, tolerance)
                bench.found = {subject: [] for subject in subjects}
                for subject in measure.interleaved(subjects, options.repetitions):
                    say(f"{shape} {method} {subject}")
                    bench.found[subject].append(bench.run(subject, shape, method))
                operations = float(OPERATIONS[method] * num_weights(folder))
                print(f"\n## {shape}, {method}\n\n{show(bench, subjects, operations, peak)}")
                bench.check(subjects)
    print(f"\nafter: {measure.machine()}")


if __name__ == "__main__":
    main()
