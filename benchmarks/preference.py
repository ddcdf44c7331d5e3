"""Pairs of answers with their prompts shared in a packed row, beside the same row with a prompt for
each answer, and a padded rectangle; or whole steps beside TRL's DPOTrainer.

    .venv/bin/python benchmarks/preference.py [--repetitions 9] [--threads 1] [--peers FOLDER]

Forward and backward of what a preference stage asks for (log-probabilities of both answers), all
weights learning, in one process, in turns; before that, they are shown to agree. Speeds are medians
of paired CPU times.

With ``--peers``, a folder with TRL for ``PYTHONPATH``: steps of DPO as ``surefoot train`` and TRL
take them, TRL padded, as it is by default. Model, pairs, batches and settings are equal, reference
log-probabilities are computed before, and each trainer runs in a process of its own, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles

import measure
import torch
from inputs import make_dataset, make_model
from measure import say
from trainers.task import Task
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from surefoot.batch import IGNORE_INDEX, Batch, Features, OutputSpec
from surefoot.data.text.collation import collate_pairs, unshared
from surefoot.model import outputs
from surefoot.model.isolation import use_packed
from surefoot.model.outputs import LogprobHead, logprob_head_of

HIDDEN, LAYERS, VOCABULARY, PAIRS = 256, 4, 4_000, 4
LENGTHS = [(32, 64), (64, 64), (128, 64), (384, 64)]  # of prompts and answers, on average
WAYS = ("shared", "packed", "padded")


def model() -> PreTrainedModel:
    """A Qwen2 of random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN * 3,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // 64,
        num_key_value_heads=2,
    )
    return Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def pairs(prompt: int, answer: int) -> list[Features]:
    """Some pairs of about these lengths."""
    found: list[Features] = []
    for i in range(PAIRS):
        share = 0.5 + (i + 0.5) / PAIRS  # from a half more to a half less
        lengths = [round(prompt * share), round(answer * share), round(answer * (2 - share))]
        ids = torch.randint(0, VOCABULARY, (sum(lengths),)).tolist()
        labels = [IGNORE_INDEX] * lengths[0] + ids[lengths[0] :]
        found.append({"input_ids": ids, "labels": labels, "lengths": lengths})
    return found


def learn(policy: PreTrainedModel, head: LogprobHead | None, batch: Batch) -> torch.Tensor:
    """One pass, forward and backward; the log-probability of each answer."""
    policy.zero_grad()
    logps = outputs.compute(policy, batch, OutputSpec(("logps",)), head=head).logps
    assert logps is not None
    answers = logps.new_zeros(2 * PAIRS).index_add(0, batch.extras["answer"], logps)
    torch.nn.functional.logsigmoid(answers[::2] - answers[1::2]).sum().backward()
    return answers.detach()


TRAINERS = {"surefoot": "Surefoot", "trl_dpo": "TRL `DPOTrainer`"}
PAIRS_A_STEP, STEPS, WARMUP = 8, 6, 2


def make_pairs(folder: Path, prompt: int, answer: int) -> None:
    """A model of random weights, and pairs of about these lengths: a word has 1.5 tokens."""
    rows = make_dataset(folder, 256)
    make_model(folder, rows, hidden=HIDDEN, layers=LAYERS, vocabulary=VOCABULARY)
    words, dice = " ".join(row["output"] for row in rows).split(), random.Random(0)

    def text(mean: int) -> str:
        count, start = round(mean / 1.5 * dice.uniform(0.5, 1.5)), dice.randrange(len(words) // 2)
        return " ".join(words[start : start + count])

    made = [
        {"instruction": text(prompt), "chosen": text(answer), "rejected": text(answer)}
        for _ in range(PAIRS_A_STEP * (STEPS + 2))
    ]
    (folder / "rows.json").write_text(json.dumps(made))
    info = {"rows": {"file_name": "rows.json", "ranking": True}}
    (folder / "dataset_info.json").write_text(json.dumps(info))


def trained(program: str, folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """The report of one trainer, in a process of its own."""
    report = folder / "report.json"
    with tempfile.TemporaryDirectory() as output:
        todo = Task(
            *(str(folder), output, str(report), "padded", "full", PAIRS_A_STEP, STEPS, WARMUP),
            *(1024, 0),
            stage="dpo",
        )
        (folder / "task.json").write_text(json.dumps(asdict(todo)))
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(options.threads)}
        if program != "surefoot":
            env["PYTHONPATH"] = options.peers
        script = Path(__file__).parent / "trainers" / f"with_{program}.py"
        command = [sys.executable, str(script), str(folder / "task.json")]
        measure.timed(command, env, folder / "log")
    found: dict[str, object] = json.loads(report.read_text())
    return found


def beside_trl(options: argparse.Namespace) -> None:
    """Steps of both trainers, and the table."""
    rows = []
    for prompt, answer in LENGTHS:
        found: dict[str, list[dict[str, object]]] = {name: [] for name in TRAINERS}
        with tempfile.TemporaryDirectory() as name:
            make_pairs(Path(name), prompt, answer)
            for program in measure.interleaved(list(TRAINERS), options.repetitions):
                found[program].append(trained(program, Path(name), options))
                say(f"{prompt}, {answer}, {program}: {found[program][-1]['cpu']:.2f} CPU seconds")
        ours, theirs = (found[one][0]["losses"][:STEPS] for one in TRAINERS)
        gap = max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))
        cpu = {one: [float(each["cpu"]) for each in found[one]] for one in TRAINERS}
        peaks = [f"{median(each['peak_mb'] for each in found[one]):,.0f}" for one in TRAINERS]
        speed = [f"{PAIRS_A_STEP * (STEPS - WARMUP) / median(cpu[one]):.1f}" for one in TRAINERS]
        ratio = _ratio(cpu["trl_dpo"], cpu["surefoot"])
        rows.append([f"{prompt}", f"{answer}", *speed, ratio, *peaks, f"{gap:.0e}"])
    head = ["prompt", "answer", "pairs a CPU second", "TRL's", "times as fast"]
    head += ["peak MB", "TRL's", "losses differ by"]
    print(f"\n{measure.table(head, rows)}\n\nafter: {measure.machine()}")


def main() -> None:
    """Measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peers", help="a folder with TRL, for PYTHONPATH: steps beside TRL")
    options = parser.parse_args()
    if options.peers:
        print(measure.machine())
        beside_trl(options)
        return
    torch.set_num_threads(options.threads)
    print(measure.machine(), measure.versions("surefoot", "torch", "transformers"), sep="\n")
    plain, packed = model(), model()
    assert use_packed(packed)
    models = {"shared": packed, "packed": packed, "padded": plain}
    heads = {way: logprob_head_of(one) for way, one in models.items()}
    rows = []
    for prompt, answer in LENGTHS:
        items = pairs(prompt, answer)
        row = collate_pairs(items, packing=True)
        batches = {"shared": row, "packed": unshared(row)}
        batches["padded"] = collate_pairs(items, packing=False)
        said = [learn(models[way], heads[way], batches[way]) for way in WAYS]
        assert all(torch.allclose(one, said[0], rtol=1e-4) for one in said)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(options.repetitions):
            say(f"prompts of {prompt}, answers of {answer}, turn {turn + 1}")
            for way in WAYS:
                started = time.process_time()
                learn(models[way], heads[way], batches[way])
                seconds[way].append(time.process_time() - started)
        tokens = batches["packed"].num_tokens / batches["shared"].num_tokens
        ratios = [_ratio(seconds[way], seconds["shared"]) for way in WAYS[1:]]
        own = f"{median(seconds['shared']):.2f}"
        rows.append([f"{prompt}", f"{answer}", f"{tokens:.2f}", own, *ratios])
    head = ["prompt", "answer", "fewer tokens", "seconds", "beside packed", "beside padded"]
    print(f"\n{measure.table(head, rows)}\n\nafter: {measure.machine()}")


def _ratio(others: list[float], ours: list[float]) -> str:
    """How many times as fast, and the middle half."""
    found = [other / own for other, own in zip(others, ours, strict=True)]
    low, middle, high = quantiles(found, n=4)
    return f"{middle:.2f} [{low:.2f}–{high:.2f}]"


if __name__ == "__main__":
    main()
