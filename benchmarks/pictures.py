"""Rows with pictures: training beside the Hugging Face Trainer, encoding beside the processor.

    .venv/bin/python benchmarks/pictures.py [--kinds gemma3 idefics3 llava] [--repetitions 5]

Models of random weights in float32 with their real processors, and rows of no, one and two small
pictures of three sizes. ``surefoot train`` runs as it does by default, and padded. The Hugging Face
Trainer has the model's processor in its collator, as its documentation shows it, and so trains on
prompts, too. Every subject is a process of its own with one thread, in turns. Tokens are those that
enter the model, padding not counted. Memory is the peak of a process after the warm-up, less what
it had when torch and transformers were imported.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import measure
from measure import say
from trainers.task import Task

FOLDER = Path(__file__).parent
SUBJECTS = {  # the program and its variant
    "trainer_pictures": "Hugging Face Trainer, processor in its collator",
    "surefoot_pictures-packed": "Surefoot",
    "surefoot_pictures-padded": "Surefoot, padded",
    "surefoot_pictures-prompts": "Surefoot, trained on prompts too",
}
PEER, _, _, SAME = SUBJECTS  # the last one trains on the labels of the peer
KINDS = ("gemma3", "idefics3", "llava")  # whose processors need Pillow alone
ROWS, BATCH, STEPS, WARMUP = 1280, 32, 40, 4
TEXT = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "head_dim": 24}
TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
Report = dict[str, Any]


@dataclass
class Bench:
    """Where everything is, and what was measured so far."""

    folder: Path
    kind: str
    found: dict[str, list[Report]] = field(default_factory=dict)

    def run(self, name: str) -> Report:
        """One subject, once."""
        program, _, variant = name.partition("-")
        todo = Task(
            inputs=str(self.folder),
            output=str(self.folder / "run"),
            report=str(self.folder / "report.json"),
            variant=variant,
            method="full",
            batch=BATCH,
            steps=STEPS,
            warmup=WARMUP,
            cutoff_len=1024,
            pad_token_id=0,
        )
        shutil.rmtree(todo.output, ignore_errors=True)
        path = self.folder / "task.json"
        path.write_text(json.dumps(asdict(todo)))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        env |= {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(self.folder / "caches")}
        command = [sys.executable, str(FOLDER / "trainers" / f"with_{program}.py"), str(path)]
        measure.timed(command, env, self.folder / "log")
        report: Report = json.loads(Path(todo.report).read_text())
        return report

    def check(self) -> None:
        """Stop where the work was not the same."""
        first = {name: runs[0]["losses"][0] for name, runs in self.found.items()}
        # the rows of LLaVA have other tokens, see tests/data/test_pictures.py
        is_same = self.kind != "llava" and SAME in first
        if is_same and not math.isclose(first[PEER], first[SAME], rel_tol=1e-4):
            raise SystemExit(f"{self.kind}: the first losses differ: {first}")

    def table(self) -> str:
        """Speed and memory of each subject."""
        cost = {n: [r["cpu"] / r["tokens"] for r in runs] for n, runs in self.found.items()}
        above = {n: [r["above_mb"] for r in runs] for n, runs in self.found.items()}
        rows = [
            [
                SUBJECTS[name],
                measure.spread([1 / seconds for seconds in cost[name]], 0),
                measure.ratio(cost[name], cost[PEER]),
                measure.spread(above[name], 0),
                f"{median(above[name]) / median(above[PEER]):.2f}",
                f"{runs[0]['tokens']:,}",
                f"{runs[0]['losses'][0]:.5f}",
            ]
            for name, runs in self.found.items()
        ]
        head = ["", "tokens per CPU s", "times the Trainer's", "MB above idle", "of the Trainer's"]
        return measure.table([*head, "tokens", "first loss"], rows)


def import_for_inputs() -> Any:
    """``tests/pictures.py``, which has the tiny models. It comes before this file, of that name."""
    sys.path[:0] = [str(FOLDER.parent / "tests"), str(FOLDER / "trainers")]
    import pictures

    return pictures


def make_inputs(pictures: Any, folder: Path, kind: str) -> None:
    """A model of about 0.4 million weights, rows, and their pictures."""
    folder.mkdir()
    pictures.CONFIGS[kind]["text_config"] |= TEXT
    pictures.CONFIGS[kind]["vision_config"] |= TOWER
    pictures.save_model(folder / "base", kind)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, pictures.rows(folder, ROWS))))


def make_photos(folder: Path) -> None:
    """The same rows with photos of telephones that a page has made smaller: 640 x 480, JPEG."""
    import PIL.Image

    for path in folder.glob("*_*.png"):
        PIL.Image.open(path).resize((640, 480)).save(path.with_suffix(".jpg"), quality=85)
    rows = folder / "rows.jsonl"
    rows.write_text(rows.read_text().replace(".png", ".jpg"))


def encoding(pictures: Any, folder: Path, kind: str, size: str, repetitions: int) -> list[str]:
    """Rows a CPU second from a file to ids and labels, and by the processor row by row."""
    from transformers import AutoProcessor
    from with_trainer_pictures import conversations, processed

    from surefoot.data.training_data import prepare
    from surefoot.recipe.recipe_data import encoding_of, open_codec

    rows, base = conversations(folder), folder / "base"
    processor = AutoProcessor.from_pretrained(base)
    ids: dict[str, list[list[int]]] = {}

    def by_processor() -> None:
        ids["processor"] = [list(processed(processor, [row])["input_ids"][0]) for row in rows]

    def by_surefoot() -> None:  # from the file to the cache, with a new codec that knows no size
        data = prepare(encoding_of(recipe, open_codec(recipe, base))).train
        ids["surefoot"] = [list(data[index]["input_ids"]) for index in range(len(data))]

    works: dict[str, Callable[[], None]] = {"surefoot": by_surefoot, "processor": by_processor}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn, name in enumerate(measure.interleaved(list(works), repetitions + 1)):
        cache = str(folder / f"cache-{size}-{turn}")
        recipe = pictures.recipe(folder, base, cache_dir=cache)
        start = time.process_time()
        works[name]()
        if turn >= len(works):  # in the first round, both import what they need
            seconds[name].append(time.process_time() - start)
    pairs = zip(ids["surefoot"], ids["processor"], strict=True)
    num_equal = sum(ours == theirs[: len(ours)] for ours, theirs in pairs)
    return [
        kind,
        size,
        measure.spread([len(rows) / s for s in seconds["surefoot"]], 0),
        measure.spread([len(rows) / s for s in seconds["processor"]], 0),
        measure.ratio(seconds["surefoot"], seconds["processor"]),
        f"{num_equal:,} of {len(rows):,}",
    ]


def main() -> None:
    """Make the inputs, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    pictures, encoded = import_for_inputs(), []
    print(measure.machine(), measure.versions("surefoot", "torch", "transformers"), sep="\n")
    subjects = list(dict.fromkeys([PEER, *options.only]))
    with tempfile.TemporaryDirectory() as name:
        for kind in options.kinds:
            bench = Bench(Path(name) / kind, kind, {subject: [] for subject in subjects})
            make_inputs(pictures, bench.folder, kind)
            for subject in measure.interleaved(subjects, options.repetitions):
                say(f"{kind} {subject}")
                bench.found[subject].append(bench.run(subject))
            print(f"\n## {kind}\n\n{bench.table()}", flush=True)
            bench.check()
            for size, change in (("small PNG", None), ("640 x 480 JPEG", make_photos)):
                if change is not None:
                    change(bench.folder)
                encoded.append(encoding(pictures, bench.folder, kind, size, options.repetitions))
    head = [
        "rows per CPU s, cold",
        "pictures",
        "Surefoot",
        "processor, row by row",
        "times ours",
        "equal ids",
    ]
    print(f"\n{measure.table(head, encoded)}\n\nafter: {measure.machine()}")


if __name__ == "__main__":
    main()
