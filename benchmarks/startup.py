"""Seconds to the help text, to a refused typo and to the first training step, beside LLaMA-Factory.

    .venv/bin/python benchmarks/startup.py [--repetitions 5] [--only help typo ...]

Both tune the same tiny Qwen2 on the same Alpaca rows: LoRA rank 8 on all linear maps, batches of 4,
no accumulation, cutoff_len 512, float32 on the CPU, no packing, no recomputation. The first step is
over when its loss stands in the file that people watch, ``metrics.jsonl`` or ``trainer_log.jsonl``.
A first round is not counted; it warms the disk cache for both.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import inputs
import measure
import peers
from measure import Sample, say

ROWS = 1000
TOOLS = ("surefoot", "llamafactory")
RECIPE = """\
model: {{path: {inputs}}}
data: {{dataset_dir: {inputs}, datasets: [rows], template: chatml, cutoff_len: 512, packing: false}}
method: {{lora: {{rank: 8, alpha: 16}}}}
stage: sft
train: {{output_dir: {output}, max_steps: 1, global_batch_size: 4, micro_batch_size: 4, {log}: 1}}
optim: {{adamw: {{learning_rate: 1.0e-4}}}}
"""
FLAT = """\
model_name_or_path: {inputs}
dataset_dir: {inputs}
dataset: rows
template: chatml
cutoff_len: 512
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_alpha: 16
lora_target: all
output_dir: {output}
max_steps: 1
per_device_train_batch_size: 4
gradient_accumulation_steps: 1
{log}: 1
learning_rate: 1.0e-4
disable_gradient_checkpointing: true
use_cpu: true
report_to: none
"""
CONFIGS = {"surefoot": RECIPE, "llamafactory": FLAT}
LOG_KEYS = {"surefoot": "log_steps", "llamafactory": "logging_steps"}
TYPOS = {"surefoot": "log_stepz", "llamafactory": "logging_stepz"}
EXIT_CODES = {"surefoot": 2, "llamafactory": 1}  # of a misspelt key
PROGRAMS = {"surefoot": peers.SUREFOOT, "llamafactory": peers.LLAMAFACTORY}
IMPORTS = "import torch, transformers.models.qwen2.modeling_qwen2, peft"
HELP = {"surefoot": "--help", "llamafactory": "help"}
STEPS = {"surefoot": "metrics.jsonl", "llamafactory": "trainer_log.jsonl"}


@dataclass
class Bench:
    """Where everything is; every method is one thing to time, of one tool."""

    folder: Path
    runs: int = field(default=0)

    def interpreter(self, tool: str) -> Sample:
        """Python alone: no subject can be below it."""
        python = {"surefoot": sys.executable, "llamafactory": str(peers.PYTHON)}[tool]
        return self._timed(tool, [python, "-c", "pass"])

    def imports(self, tool: str) -> Sample:
        """What a first step cannot do without: torch, the model's own module, PEFT."""
        python = {"surefoot": sys.executable, "llamafactory": str(peers.PYTHON)}[tool]
        return self._timed(tool, [python, "-c", IMPORTS])

    def help(self, tool: str) -> Sample:
        """The help text."""
        return self._timed(tool, [PROGRAMS[tool], HELP[tool]])

    def version(self, tool: str) -> Sample:
        """The version."""
        return self._timed(tool, [PROGRAMS[tool], "version"])

    def typo(self, tool: str) -> Sample:
        """``train`` with a misspelt key, until it is refused."""
        command = [PROGRAMS[tool], "train", self._config(tool, TYPOS[tool])]
        return self._timed(tool, command, exit_code=EXIT_CODES[tool])

    def cold(self, tool: str) -> Sample:
        """The first step, the rows yet to be encoded."""
        return self._first_step(tool, self.folder / f"caches-{tool}-{self.runs}")

    def cached(self, tool: str) -> Sample:
        """The first step, the rows in the cache since the round that isn't counted."""
        return self._first_step(tool, self.folder / f"caches-{tool}")

    def _first_step(self, tool: str, caches: Path) -> Sample:
        config = self._config(tool, LOG_KEYS[tool])
        file = self.folder / f"run-{self.runs}" / STEPS[tool]
        env = peers.surroundings(caches)
        self.runs += 1
        command = [str(PROGRAMS[tool]), "train", str(config)]
        return measure.timed_until_line(command, env, self.folder / "log", file)

    def _timed(self, tool: str, command: list[str | Path], *, exit_code: int = 0) -> Sample:
        env = peers.surroundings(self.folder / f"caches-{tool}")
        return measure.timed(list(map(str, command)), env, self.folder / "log", exit_code=exit_code)

    def _config(self, tool: str, log: str) -> Path:
        path = self.folder / f"{tool}.yaml"
        places = {"inputs": self.folder / "inputs", "output": self.folder / f"run-{self.runs}"}
        path.write_text(CONFIGS[tool].format(**places, log=log))
        return path


TITLES: dict[str, tuple[str, Callable[[Bench, str], Sample]]] = {
    "interpreter": ("`python -c pass` (floor)", Bench.interpreter),
    "imports": ("torch, the model's module and PEFT imported (floor)", Bench.imports),
    "help": ("help", Bench.help),
    "version": ("version", Bench.version),
    "typo": ("a misspelt key is refused", Bench.typo),
    "cold": (f"first step of `train`, {ROWS:,} rows to encode", Bench.cold),
    "cached": ("first step of `train`, rows in the cache", Bench.cached),
}
Samples = dict[tuple[str, str], list[Sample]]


def take(bench: Bench, repetitions: int, things: Sequence[str]) -> Samples:
    """All samples, of both tools in turn."""
    samples: Samples = {(thing, tool): [] for thing in things for tool in TOOLS}
    for turn, tool in enumerate(measure.interleaved(TOOLS, repetitions + 1)):
        say(f"{turn // 2}/{repetitions} {tool}")
        for thing in things:
            sample = TITLES[thing][1](bench, tool)
            if turn >= len(TOOLS):
                samples[thing, tool].append(sample)
    return samples


def show(samples: Samples) -> str:
    """The report's table."""
    head = ["seconds", "", "Surefoot", "LLaMA-Factory", "times ours"]
    rows = []
    for thing in dict.fromkeys(thing for thing, _ in samples):
        title = TITLES[thing][0]
        for kind in ("wall", "cpu"):
            ours, theirs = ([getattr(s, kind) for s in samples[thing, tool]] for tool in TOOLS)
            figures = [measure.spread(ours), measure.spread(theirs), measure.ratio(ours, theirs)]
            rows.append([title, kind.replace("cpu", "CPU"), *figures])
    return measure.table(head, rows)


def main() -> None:
    """Make the inputs, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=TITLES, default=list(TITLES))
    options = parser.parse_args()
    peers.ensure()
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name))
        inputs.make_model(
            bench.folder / "inputs", inputs.make_dataset(bench.folder / "inputs", ROWS)
        )
        before = measure.machine()
        samples = take(bench, options.repetitions, options.only)
    print(f"{before}\n{measure.versions('surefoot', 'torch', 'transformers', 'peft')}")
    print(peers.versions("llamafactory", "torch", "transformers", "peft"))
    print(show(samples), f"after: {measure.machine()}", sep="\n\n")


if __name__ == "__main__":
    main()
