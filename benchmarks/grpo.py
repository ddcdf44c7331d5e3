"""Steps of GRPO beside TRL's GRPOTrainer: the same model, prompts, responses, rewards and settings.

    .venv/bin/python benchmarks/grpo.py [--repetitions 3] [--steps 4] [--words 0] [--peers FOLDER]

Each trainer runs in a process of its own, in turns. Surefoot's run comes first and notes what it
samples; TRL's ``generate`` is then made to sample the same tokens, by a logits processor that
leaves one of them, so both train on the same tokens. Losses on-policy are 0 by construction; the
norms of the gradients are compared instead. ``--peers`` is a folder with TRL for ``PYTHONPATH``;
``--words`` makes prompts longer.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import measure
from measure import say

PROMPTS, GROUP, LONGEST, MICRO, WARMUP = 8, 8, 96, 8, 1
Figures = dict[str, Any]


class Clock:
    """From the end of the warm-up to the end of the last step: seconds, and the peak of memory."""

    def __init__(self, steps: int) -> None:
        self.steps, self.num_done, self.figures = steps, 0, Figures()

    def end_step(self) -> None:
        """A step has ended."""
        self.num_done += 1
        if self.num_done == WARMUP:
            Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
            self._cpu, self._wall = time.process_time(), time.monotonic()
        if self.num_done == self.steps:
            status = Path("/proc/self/status").read_text().splitlines()
            peak = next(line for line in status if line.startswith("VmHWM"))
            self.figures = {
                "cpu": time.process_time() - self._cpu,
                "wall": time.monotonic() - self._wall,
                "peak_mb": int(peak.split()[1]) / 1024,
            }


def vowels(text: str) -> float:
    """A reward that differs between responses."""
    return sum(one in "aeiou" for one in text) / (len(text) + 1)


def make_inputs(folder: Path, num_words: int = 0) -> None:
    """A model of random weights, which ends a response after some 50 tokens, and prompts, each with
    so many words before it."""
    from inputs import make_dataset, make_model

    rows = make_dataset(folder / "data", 256)
    words = " ".join(row["output"] for row in rows).split()
    for number, row in enumerate(rows if num_words else ()):
        first = number * 31
        row["instruction"] = " ".join([*words[first : first + num_words], row["instruction"]])
    (folder / "data" / "rows.json").write_text(json.dumps(rows))
    make_model(folder / "model", rows, hidden=256, layers=4, vocabulary=4096)
    config = {"eos_token_id": list(range(300, 380)), "pad_token_id": 0}
    (folder / "model" / "generation_config.json").write_text(json.dumps(config))
    code = inspect.getsource(vowels)
    code += "\n\ndef reward(completions):\n    return [vowels(text) for text in completions]\n"
    (folder / "rewards.py").write_text(code)


def with_surefoot(folder: Path, steps: int) -> Figures:
    """Train as ``surefoot train`` does; notes the prompts and responses of each step."""
    import surefoot
    from surefoot.training import TrainerCallback
    from surefoot.training.context import NetworkContext

    clock, norms, windows = Clock(steps), list[float](), list[list[Any]]()
    inner = NetworkContext.generate

    def generate(self: Any, prompts: Any, settings: Any, *, turn: int = 0) -> Any:
        found = inner(self, prompts, settings, turn=turn)
        windows.append([[list(p), list(one.ids)] for p, one in zip(prompts, found, strict=True)])
        return found

    NetworkContext.generate = generate  # type: ignore[method-assign]

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any) -> None:
            clock.end_step()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any) -> None:
            norms.extend([logs["grad_norm"]] if "grad_norm" in logs else [])

    stage = {"reward": f"{folder}/rewards.py:reward", "group_size": GROUP}
    recipe = {
        "model": {"path": str(folder / "model")},
        "data": {"datasets": ["rows"], "dataset_dir": str(folder / "data"), "cutoff_len": 512},
        "stage": {"grpo": {**stage, "max_new_tokens": LONGEST, "sampling_batch_size": 64}},
        "train": {
            "output_dir": str(folder / "surefoot"),
            "max_steps": steps,
            "global_batch_size": PROMPTS,
            "micro_batch_size": MICRO,
            "log_steps": 1,
        },
        "optim": {"adamw": {"learning_rate": 1e-4, "schedule": "constant", "weight_decay": 0.0}},
        "checkpoint": {"save_steps": None},
    }
    surefoot.train(recipe, callbacks=[Watch()])
    (folder / "windows.json").write_text(json.dumps(windows))
    tokens = sum(len(ids) for window in windows[WARMUP:] for _, ids in window)
    return {**clock.figures, "norms": norms, "tokens": tokens}


def with_trl(folder: Path, steps: int) -> Figures:
    """Train with TRL on the prompts and responses of Surefoot's run."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    windows = json.loads((folder / "windows.json").read_text())
    clock, norms = Clock(steps), list[float]()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)

    class Forced(LogitsProcessor):  # type: ignore[misc]
        """Leaves each row the token that Surefoot has sampled."""

        def __init__(self, rows: Any) -> None:
            wide = [row + [0] * (LONGEST - len(row)) for row in rows]
            self.ids, self.step = torch.tensor(wide), 0

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            found = torch.full_like(scores, -torch.inf)
            found.scatter_(1, self.ids[:, self.step, None], 0.0)
            self.step += 1
            return found

    class SameTokens(GRPOTrainer):  # type: ignore[misc]
        """Its own generation, of the same tokens."""

        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            known = defaultdict(list)
            for prompt, ids in windows[self.state.global_step]:
                known[tuple(prompt)].append(ids)
            rows = [known[tuple(prompt)].pop(0) for prompt in prompt_ids]
            generate = self.model.generate
            self.model.generate = lambda **given: generate(**given, logits_processor=[Forced(rows)])
            try:
                return super()._generate_single_turn(prompt_ids, *args, **kwargs)
            finally:
                self.model.generate = generate

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.end_step()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            norms.extend([float(logs["grad_norm"])] if "grad_norm" in logs else [])

    def reward(completions: Any, **_: Any) -> list[float]:
        return [vowels(one) for one in completions]

    # one prompt of each group, as text: its ids are those of Surefoot's template
    texts = [tokenizer.decode(p) for window in windows for p, _ in window[::GROUP]]
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=steps,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=PROMPTS * GROUP // MICRO,
        num_generations=GROUP,
        max_completion_length=LONGEST,
        loss_type="grpo",
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        adam_epsilon=1e-8,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    trainer = SameTokens(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer,
        callbacks=[Watch()],
    )
    trainer.train()
    tokens = sum(len(ids) for window in windows[WARMUP:] for _, ids in window)
    return {**clock.figures, "norms": norms, "tokens": tokens}


SUBJECTS = {"surefoot": with_surefoot, "trl": with_trl}


def run(subject: str, folder: Path, args: argparse.Namespace) -> Figures:
    """One run in a process of its own."""
    paths = [os.environ.get("PYTHONPATH", ""), args.peers if subject == "trl" else None]
    report = folder / f"{subject}.json"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(args.threads),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, __file__, "--subject", subject, "--folder", str(folder)]
    log = folder / f"{subject}.log"
    with log.open("w") as output:
        code = subprocess.run(
            [*command, "--steps", str(args.steps)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    if code:
        raise SystemExit(f"{subject} ended with {code}:\n{log.read_text()[-2000:]}")
    found: Figures = json.loads(report.read_text())
    return found


def compare(args: argparse.Namespace) -> None:
    """Both in turns, and their figures."""
    found: dict[str, list[Figures]] = {name: [] for name in SUBJECTS}
    for turn in range(args.repetitions):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make_inputs(folder, args.words)
            for subject in SUBJECTS:
                found[subject].append(run(subject, folder, args))
        norms = [one[-1]["norms"] for one in found.values()]
        gap = max(abs(a / b - 1) for a, b in zip(*norms, strict=True))
        told = ", ".join(f"{name} {one[-1]['cpu']:.1f}" for name, one in found.items())
        say(f"turn {turn + 1}: {told} CPU seconds; gradient norms differ by {gap:.1e} at most")
    rows = []
    for name, each in found.items():
        speeds = sorted(one["tokens"] / one["cpu"] for one in each)
        walls = sorted(one["tokens"] / one["wall"] for one in each)
        pairs = zip(each, found["surefoot"], strict=True)
        ratios = sorted(one["cpu"] / own["cpu"] for one, own in pairs)
        rows.append(
            [
                name,
                *(f"{median(v):,.0f} ({v[0]:,.0f} - {v[-1]:,.0f})" for v in (speeds, walls)),
                f"{median(one['peak_mb'] for one in each):,.0f}",
                f"{median(ratios):.2f}x ({ratios[0]:.2f} - {ratios[-1]:.2f})",
            ]
        )
    head = ["trainer", "tokens per CPU second", "tokens per second", "peak MB", "CPU seconds"]
    print(f"\n{measure.table(head, rows)}\n\nafter: {measure.machine()}")


def main() -> None:
    """Compare, or be one of the two."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--words", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peers", help="a folder with TRL, for PYTHONPATH")
    parser.add_argument("--subject", choices=SUBJECTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.subject is None:
        print(measure.machine())
        compare(args)
        return
    figures = SUBJECTS[args.subject](args.folder, args.steps)
    (args.folder / f"{args.subject}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
