"""Seconds from the death of a rank to the next step, beside the Trainer under torchrun's restarts.

    .venv/bin/python benchmarks/restart.py [--repetitions 3] [--ranks 4] [--before CHECKOUT]

All tune the same tiny Qwen2 on the same rows, all of its weights, with a save each 25 steps. After
some steps, one rank is killed by SIGKILL; the launcher ends the others and starts all again, and
they resume from the last checkpoint. The next step is over when its loss is printed. CPU seconds
are those of all processes, of the launcher too, divided by the number of ranks. ``--before`` is
another checkout of Surefoot, which runs in this environment. LLaMA-Factory takes the environment of
the peers (``--only llamafactory``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import inputs
import measure
import peers
import psutil
from datasets import Dataset
from measure import Sample, say
from trainers.task import Task
from transformers import AutoTokenizer

HERE = Path(__file__).resolve().parent
TITLES = {
    "surefoot": "Surefoot",
    "before": "Surefoot, the other checkout",
    "trainer": "Trainer, torchrun",
    "llamafactory": "LLaMA-Factory, torchrun",
}
ROWS, CUTOFF, STEPS = 400, 256, 100_000
KILLED_AT = 30  # amid two saves: the Trainer cannot resume from half of one
STEP = re.compile(rb"^(step=\d+/|\{'loss')", re.MULTILINE)  # a line of ours, and of the Trainer's
LAST_STEP = 0.3  # seconds after a kill in which the line of the step before may yet come
TIMEOUT = 600.0
RECIPE = """\
model: {{path: {inputs}}}
data: {{dataset_dir: {inputs}, datasets: [rows], template: chatml, cutoff_len: 256, packing: false}}
stage: sft
train: {{output_dir: {output}, max_steps: 100000, global_batch_size: {batch}, micro_batch_size: 2, \
log_steps: 1}}
optim: {{adamw: {{learning_rate: 1.0e-4}}}}
checkpoint: {{save_steps: 25, keep: 2}}
parallel: {{num_processes: {ranks}, dp_replicate: {ranks}, max_restarts: 3}}
"""
FLAT = """\
model_name_or_path: {inputs}
dataset_dir: {inputs}
dataset: rows
template: chatml
cutoff_len: 256
stage: sft
do_train: true
finetuning_type: full
output_dir: {output}
max_steps: 100000
per_device_train_batch_size: 2
gradient_accumulation_steps: 1
logging_steps: 1
save_steps: 25
save_total_limit: 2
learning_rate: 1.0e-4
disable_gradient_checkpointing: true
use_cpu: true
ddp_backend: gloo
disable_tqdm: true
report_to: none
"""


@dataclass
class Bench:
    """Where everything is, and how many ranks there are."""

    folder: Path
    ranks: int
    before: Path | None
    runs: int = field(default=0)

    def round_of(self, subject: str) -> tuple[Sample, Sample]:
        """What it costs to the first step, and from a kill to the next one."""
        self.runs += 1
        command, env = self._command(subject, self.folder / f"run-{self.runs}")
        log, start = self.folder / f"log-{self.runs}", time.monotonic()
        with log.open("wb") as output:
            launcher = psutil.Popen(command, env=env, stdout=output, stderr=output)
        try:
            self._wait(launcher, command, log, 1)
            first = Sample(time.monotonic() - start, _cpu(launcher))
            self._wait(launcher, command, log, KILLED_AT)
            killed = _ranks(launcher, command[-1])[self.ranks // 2]
            cpu, start = _cpu(launcher), time.monotonic()
            killed.send_signal(signal.SIGKILL)
            time.sleep(LAST_STEP)
            self._wait(launcher, command, log, _count(log) + 1)
            return first, Sample(time.monotonic() - start, _cpu(launcher) - cpu)
        finally:
            _end(launcher)

    def _wait(self, launcher: psutil.Popen, command: Sequence[str], log: Path, steps: int) -> None:
        deadline = time.monotonic() + TIMEOUT
        while _count(log) < steps:
            if launcher.poll() is not None or time.monotonic() > deadline:
                raise measure.failure(command, launcher.returncode, log)
            time.sleep(measure.POLL_SECONDS)

    def _command(self, subject: str, output: Path) -> tuple[list[str], Mapping[str, str]]:
        caches = self.folder / f"caches-{subject}"
        env = {**peers.surroundings(caches), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        # Or ranks that torchrun starts again ask the dead ones for their addresses, and give up.
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        place = self.folder / "inputs"
        torchrun = [*("-m", "torch.distributed.run", "--nproc-per-node", str(self.ranks))]
        torchrun += ["--max-restarts", "3", "--standalone"]  # a free port
        if subject == "trainer":
            script, file = (
                HERE / "trainers" / "with_trainer_restarted.py",
                output.with_suffix(".json"),
            )
            todo = Task(
                **{"inputs": str(place), "output": str(output), "report": "", "variant": ""},
                **{"method": "full", "batch": 2 * self.ranks, "micro": 2, "steps": STEPS},
                **{"warmup": 0, "cutoff_len": CUTOFF, "pad_token_id": 0},
            )
            file.write_text(json.dumps(asdict(todo)))
            return [sys.executable, *torchrun, str(script), str(file)], env
        file = output.with_suffix(".yaml")
        text = FLAT if subject == "llamafactory" else RECIPE
        file.write_text(
            text.format(inputs=place, output=output, batch=2 * self.ranks, ranks=self.ranks)
        )
        if subject == "llamafactory":
            module = ["--module", "llamafactory.launcher"]
            return [str(peers.PYTHON), *torchrun, *module, str(file)], env
        tree = self.before if subject == "before" else HERE.parent
        env["PYTHONPATH"] = str(tree / "src")  # type: ignore[operator]
        return [sys.executable, "-m", "surefoot", "train", str(file)], env


def _count(log: Path) -> int:
    return len(STEP.findall(log.read_bytes()))


def _ranks(launcher: psutil.Process, mark: str) -> list[psutil.Process]:
    """The processes that train: of those with ``mark`` in their command, the ones without another
    such process below."""
    marked = [each for each in launcher.children(recursive=True) if mark in each.cmdline()]
    parents = {each.ppid() for each in marked}
    return sorted((each for each in marked if each.pid not in parents), key=lambda each: each.pid)


def _cpu(launcher: psutil.Process) -> float:
    """CPU seconds of a process and of all below it, those that have ended among them."""
    total = 0.0
    for process in (launcher, *launcher.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # two of itself, two of children that have ended
    return total


def _end(launcher: psutil.Process) -> None:
    processes = [launcher]
    with contextlib.suppress(psutil.NoSuchProcess):
        processes += launcher.children(recursive=True)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    launcher.wait()
    psutil.wait_procs(processes, timeout=10)


Rounds = dict[str, list[tuple[Sample, Sample]]]


def show(rounds: Rounds, ranks: int) -> str:
    """The report's table."""
    head = ["seconds", "", *(TITLES[subject] for subject in rounds)]
    rows = []
    for index, title in enumerate(("to the first step", "from the kill to the next step")):
        for kind in ("wall", "cpu"):
            share = ranks if kind == "cpu" else 1
            columns = [
                measure.spread([getattr(each[index], kind) / share for each in found])
                for found in rounds.values()
            ]
            rows.append([title, "CPU, a rank" if kind == "cpu" else kind, *columns])
    return measure.table(head, rows)


def main() -> None:
    """Make the inputs, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--before", type=Path, help="another checkout of Surefoot")
    parser.add_argument("--only", nargs="+", choices=TITLES, default=["surefoot", "trainer"])
    options = parser.parse_args()
    subjects = [*options.only, *(["before"] if options.before else [])]
    if "llamafactory" in subjects:
        peers.ensure()
    with tempfile.TemporaryDirectory() as name:
        before = options.before and options.before.resolve()
        bench = Bench(Path(name), options.ranks, before)
        rows = inputs.make_dataset(bench.folder / "inputs", ROWS)
        inputs.make_model(bench.folder / "inputs", rows)
        tokenizer = AutoTokenizer.from_pretrained(bench.folder / "inputs")
        texts = [f"{row['instruction']} {row['output']}" for row in rows]
        tokens = [tokenizer(text)["input_ids"][:CUTOFF] for text in texts]
        tokenized = Dataset.from_dict({"input_ids": tokens, "labels": tokens})
        tokenized.save_to_disk(str(bench.folder / "inputs" / "tokenized"))
        machine = measure.machine()
        rounds: Rounds = {subject: [] for subject in subjects}
        for turn, subject in enumerate(measure.interleaved(subjects, options.repetitions)):
            say(f"{turn // len(subjects) + 1}/{options.repetitions} {subject}")
            rounds[subject].append(bench.round_of(subject))
    print(f"{machine}\n{measure.versions('surefoot', 'torch', 'transformers')}")
    if "llamafactory" in subjects:
        print(peers.versions("llamafactory", "torch", "transformers"))
    print(show(rounds, options.ranks), f"after: {measure.machine()}", sep="\n\n")


if __name__ == "__main__":
    main()
