"""Trained tokens a second and peak memory, beside the Hugging Face Trainer, TRL and LLaMA-Factory.

    .venv/bin/python benchmarks/train.py [--shapes S M V] [--methods full lora] [--repetitions 3]

The same model, examples, labels, batch, float32, AdamW and learning rate; every subject in a
process of its own, in turns. ``surefoot train`` runs as it does by default, the peers padded (their
default) and at the best settings that they document. The first losses must be equal where the
batches are the same; who packs several examples into rows of ``cutoff_len`` sees other batches, of
about as many tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import inputs
import measure
import peers
import tokens
from measure import say
from trainers.task import Task

SHAPES = {  # hidden size, layers, vocabulary, examples a step
    "S": (256, 6, 8_192, 8),
    "M": (512, 8, 32_000, 4),
    "V": (256, 8, 48_000, 4),  # the head's share of a Qwen2-0.5B
}
SUBJECTS = {
    "surefoot": "Surefoot",
    "trainer-padded": "Hugging Face Trainer, padded (default)",
    "trainer-one": "Hugging Face Trainer, batch 1 x accumulation",
    "trl-padded": "TRL SFTTrainer, padded",
    "trl-packing": "TRL SFTTrainer, packing",
    "llamafactory-padded": "LLaMA-Factory, padded",
    "llamafactory-packing": "LLaMA-Factory, packing (examples see each other)",
    "llamafactory-neat_packing": "LLaMA-Factory, neat_packing",
}
OTHER_BATCHES = ("packing",)  # subjects that lay examples out anew
PYTHONS = {"surefoot": Path(sys.executable), "trainer": Path(sys.executable)}
Report = Mapping[str, float | list[float]]


@dataclass
class Bench:
    """Where everything is, and what was measured so far."""

    folder: Path
    options: argparse.Namespace
    examples: int  # a step
    device: str = "cpu"
    tolerance: float = 2e-4  # of first losses, relative
    found: dict[str, list[Report]] = field(default_factory=dict)

    def run(self, name: str, shape: str, method: str) -> Report:
        """One subject, once."""
        program, _, variant = name.partition("-")
        todo = Task(
            inputs=str(self.folder / shape),
            output=str(self.folder / "run"),
            report=str(self.folder / "report.json"),
            variant=variant,
            method=method,
            batch=self.examples,
            steps=self.options.steps,
            warmup=2,
            cutoff_len=512,
            pad_token_id=0,
            device=self.device,
        )
        shutil.rmtree(todo.output, ignore_errors=True)
        (self.folder / "task.json").write_text(json.dumps(asdict(todo)))
        script = peers.FOLDER / "trainers" / f"with_{program}.py"
        python = PYTHONS.get(program, peers.PYTHON)
        env = peers.surroundings(self.folder / "caches")
        env |= {"OMP_NUM_THREADS": str(self.options.threads), "TOKENIZERS_PARALLELISM": "false"}
        env |= {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        if self.device != "cpu":
            env["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        command = [str(python), str(script), str(self.folder / "task.json")]
        measure.timed(command, env, self.folder / "log")
        return json.loads(Path(todo.report).read_text())

    def check(self, subjects: list[str]) -> None:
        """Stop where the work was not the same."""
        ours = self.found["surefoot"][0]["losses"][0]
        for name in subjects:
            theirs = self.found[name][0]["losses"][0]
            if not name.endswith(OTHER_BATCHES) and not math.isclose(
                ours, theirs, rel_tol=self.tolerance
            ):
                raise SystemExit(f"{name}: first loss {theirs}, Surefoot's is {ours}")


def show(bench: Bench, subjects: list[str]) -> str:
    """The table of one shape and method."""
    cpu = {n: [r["cpu"] / r["tokens"] for r in bench.found[n]] for n in subjects}
    peak = {n: [r["peak_mb"] for r in bench.found[n]] for n in subjects}
    rows = [
        [
            SUBJECTS[name],
            measure.spread([1 / seconds for seconds in cpu[name]], 0),
            measure.ratio(cpu["surefoot"], cpu[name]),
            measure.spread(peak[name], 0),
            measure.ratio(peak["surefoot"], peak[name]),
            f"{bench.found[name][0]['losses'][0]:.5f}",
        ]
        for name in subjects
    ]
    head = ["", "tokens per CPU s", "times ours", "peak MB", "times ours", "first loss"]
    return measure.table(head, rows)


def prepare(folder: Path, shape: str, cutoff_len: int) -> None:
    """Model, rows, and the tokens that all are given."""
    hidden, layers, vocabulary, _ = SHAPES[shape]
    rows = inputs.make_dataset(folder, 1000)
    inputs.make_model(folder, rows, hidden=hidden, layers=layers, vocabulary=vocabulary)
    tokens.tokenize(folder, cutoff_len=cutoff_len)


def main() -> None:
    """Make the inputs, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--methods", nargs="+", choices=("full", "lora"), default=["full", "lora"])
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    subjects = list(dict.fromkeys(["surefoot", *options.only]))
    if any(name.startswith(("trl", "llama")) for name in subjects):
        peers.ensure()
    print(
        measure.machine(), measure.versions("surefoot", "torch", "transformers", "peft"), sep="\n"
    )
    with tempfile.TemporaryDirectory() as name:
        for shape in options.shapes:
            prepare(Path(name) / shape, shape, 512)
            for method in options.methods:
                bench = Bench(Path(name), options, SHAPES[shape][-1])
                bench.found = {subject: [] for subject in subjects}
                for subject in measure.interleaved(subjects, options.repetitions):
                    say(f"{shape} {method} {subject}")
                    bench.found[subject].append(bench.run(subject, shape, method))
                print(f"\n## {shape}, {method}\n\n{show(bench, subjects)}", flush=True)
                bench.check(subjects)
    print(f"\nafter: {measure.machine()}")


if __name__ == "__main__":
    main()
