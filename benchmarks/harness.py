"""lm-eval: its requests answered by Surefoot, and by its own Hugging Face backend.

    .venv/bin/python benchmarks/harness.py [--repetitions 5] [--questions mmlu/data]

One model of random weights in one process, float32, in turns. Four kinds of requests: letters of
choices behind five examples, texts of choices behind five examples, texts of choices alone, and
responses to questions. Seconds are CPU seconds of answering, without reading tasks.
"""

from __future__ import annotations

import argparse
import csv
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import interleaved, machine, ratio, say, spread, table, versions
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from surefoot.use import open_model
from surefoot.use.prediction import Output

SHOTS, OURS, THEIRS = 5, "Surefoot", "lm-eval's hf"
LETTERS = "ABCD"


@dataclass(frozen=True)
class ChoiceQuestion:
    """A row of MMLU's CSV files."""

    question: str
    choices: Sequence[str]
    letter: str


def read_questions(path: Path) -> list[ChoiceQuestion]:
    """The rows of ``{split}/{subject}_{split}.csv``."""
    with path.open(newline="") as file:
        return [ChoiceQuestion(row[0], row[1:5], row[5]) for row in csv.reader(file)]


@dataclass(frozen=True)
class Kind:
    """Requests of one kind."""

    name: str
    method: str
    arguments: Sequence[tuple[str, Any]]


def save_model(folder: Path, tokenizer: str) -> None:
    """A Llama of random weights, 10 M parameters, with a tokenizer."""
    known = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(known),
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=known.bos_token_id,
        eos_token_id=known.eos_token_id,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    known.save_pretrained(folder)


def asked(one: ChoiceQuestion, *, listed: bool) -> str:
    """A question, with its choices or without."""
    lines = [f"\n{a}. {b}" for a, b in zip(LETTERS, one.choices, strict=False)] if listed else []
    return one.question + "".join(lines) + "\nAnswer:"


def requests_of(questions: Path, subject: str, rows: int) -> list[Kind]:
    """The requests for some questions of a subject."""
    chosen = read_questions(questions / "test" / f"{subject}_test.csv")[:rows]
    shots = read_questions(questions / "dev" / f"{subject}_dev.csv")[:SHOTS]
    head = "".join(f"{asked(s, listed=True)} {s.letter}\n\n" for s in shots)
    plain = "".join(
        f"{asked(s, listed=False)} {s.choices[LETTERS.index(s.letter)]}\n\n" for s in shots
    )
    letters = [(head + asked(q, listed=True), f" {x}") for q in chosen for x in "ABCD"]
    texts = [(plain + asked(q, listed=False), f" {x}") for q in chosen for x in q.choices]
    alone = [(asked(q, listed=False), f" {x}") for q in chosen for x in q.choices]
    told = {"until": ["\n\n"], "max_gen_toks": 48, "do_sample": False}
    responses = [(asked(q, listed=False), told) for q in chosen]
    return [
        Kind(f"letters behind {SHOTS} examples", "loglikelihood", letters),
        Kind(f"texts behind {SHOTS} examples", "loglikelihood", texts),
        Kind("texts alone", "loglikelihood", alone),
        Kind("responses of 48 tokens", "generate_until", responses),
    ]


def subjects_of(folder: Path, batch_size: int) -> dict[str, Callable[[], Any]]:
    """What makes each backend anew: ours stores results, and must not find those of before."""
    from lm_eval.models.huggingface import HFLM

    from surefoot.use.harness import HarnessModel
    from surefoot.use.prediction import open_results

    theirs = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=batch_size)
    opened = open_model(folder)

    def ours() -> Any:
        output = Output(folder / "out.jsonl", force=True)
        output.remove_parts()
        journal = open_results(output, opened, ["benchmark"])
        return HarnessModel(opened, journal, batch_size=batch_size)

    return {OURS: ours, THEIRS: lambda: theirs}


def timed(model: Any, kind: Kind) -> tuple[float, Any]:
    """CPU seconds, and the answers."""
    from lm_eval.api.instance import Instance

    requests = [
        Instance(kind.method, {}, pair, index, metadata=("", index, 1))  # type: ignore[arg-type]
        for index, pair in enumerate(kind.arguments)
    ]
    start = time.process_time()
    found = getattr(model, kind.method)(requests, disable_tqdm=True)
    return time.process_time() - start, found


def compare(
    kind: Kind, backends: Mapping[str, Callable[[], Any]], repetitions: int
) -> tuple[list[str], str]:
    """A line of the table, and how far the answers are apart."""
    seconds: dict[str, list[float]] = {name: [] for name in backends}
    answers: dict[str, Any] = {}
    for name in backends:
        timed(backends[name](), Kind(kind.name, kind.method, kind.arguments[:8]))  # warm
    for name in interleaved(list(backends), repetitions):
        taken, answers[name] = timed(backends[name](), kind)
        seconds[name].append(taken)
    ours, theirs = answers[OURS], answers[THEIRS]
    if kind.method == "loglikelihood":
        apart = max(abs(a[0] - b[0]) for a, b in zip(ours, theirs, strict=True))
        said = f"log-probabilities at most {apart:.1e} apart"
    else:
        same = sum(a == b for a, b in zip(ours, theirs, strict=True))
        said = f"{same} of {len(ours)} responses the same"
    line = [kind.name, str(len(kind.arguments)), spread(seconds[OURS]), spread(seconds[THEIRS])]
    return [*line, ratio(seconds[OURS], seconds[THEIRS])], said


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--questions", type=Path, default=Path("mmlu/data"))
    parser.add_argument("--subject", default="astronomy")
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--only", default="", help="a word in the names of the kinds")
    parser.add_argument("--tokenizer", default="Qwen/Qwen3-0.6B")
    told = parser.parse_args()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), told.tokenizer)
        backends = subjects_of(Path(folder), told.batch_size)
        rows, notes = [], []
        kinds = requests_of(told.questions, told.subject, told.rows)
        for kind in (one for one in kinds if told.only in one.name):
            row, note = compare(kind, backends, told.repetitions)
            rows.append(row)
            notes.append(f"{kind.name}: {note}")
    say(machine())
    say(versions("surefoot", "lm_eval", "transformers", "torch"))
    say(table(["requests", "rows", OURS, THEIRS, "times ours"], rows))
    say("\n".join(notes))


if __name__ == "__main__":
    main()
