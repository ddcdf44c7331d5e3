"""Tokens a second from a file of Alpaca rows to ids and labels, cold and cached, beside the peers.

    .venv/bin/python benchmarks/encode.py [--rows 20000] [--repetitions 3] [--cutoff-len 512]

Subjects: Surefoot's ``data.prepare``; LLaMA-Factory's ``get_dataset``; plain ``datasets.map`` with
``apply_chat_template``; and as a floor the Rust tokenizer alone. All get the same rows, tokenizer,
ChatML template and ``cutoff_len``, one process and no other worker; each is timed in a fresh
process, cold with an empty cache and then with the cache that this left. A first round, not timed,
checks that all give the same ids, and the same labels up to what is said in the report.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import inputs
import measure
import numpy as np
import peers
from measure import Sample, say

PYTHONS = {
    "surefoot": Path(sys.executable),
    "llamafactory": peers.PYTHON,
    "datasets": Path(sys.executable),
    "tokenizer": Path(sys.executable),
}
TITLES = {
    "surefoot": "Surefoot",
    "llamafactory": "LLaMA-Factory `get_dataset`",
    "datasets": "`datasets.map` + `apply_chat_template`",
    "tokenizer": "Rust tokenizer alone (floor)",
}
NO_CACHE = "tokenizer"

Arrays = Mapping[str, np.ndarray]


@dataclass
class Bench:
    """Where everything is, and what was measured so far."""

    folder: Path
    cutoff_len: int
    cold: dict[str, list[Sample]] = field(default_factory=lambda: {name: [] for name in TITLES})
    cached: dict[str, list[Sample]] = field(default_factory=lambda: {name: [] for name in TITLES})

    def check(self) -> tuple[int, list[str]]:
        """One round that isn't timed. Returns the number of tokens, and what was found."""
        found = {}
        for name in TITLES:
            self._encode(name, "check", dump=True)
            with np.load(self.folder / f"{name}.npz") as file:
                found[name] = {key: file[key] for key in file.files}
        return len(found["surefoot"]["ids"]), agreement(found)

    def measure(self, repetitions: int) -> None:
        """All rounds."""
        for turn, name in enumerate(measure.interleaved(list(TITLES), repetitions)):
            say(f"{turn // len(TITLES) + 1}/{repetitions} {name}")
            caches = f"{name}-{turn}"
            self.cold[name].append(self._encode(name, caches))
            if name != NO_CACHE:
                self.cached[name].append(self._encode(name, caches))

    def _encode(self, name: str, caches: str, *, dump: bool = False) -> Sample:
        report = self.folder / f"{name}.json"
        script = peers.FOLDER / "encoders" / f"with_{name}.py"
        command = [PYTHONS[name], script, self.folder / "inputs", str(self.cutoff_len), report]
        env = peers.surroundings(self.folder / "caches" / caches)
        command += ["dump"] if dump else []
        measure.timed(list(map(str, command)), env, self.folder / f"{name}.log")
        return Sample(**json.loads(report.read_text()))


def agreement(found: Mapping[str, Arrays]) -> list[str]:
    """What the outputs have in common; stops where the work is not the same."""
    ours = found["surefoot"]
    for name, theirs in found.items():
        if not all(np.array_equal(ours[key], theirs[key]) for key in ("offsets", "ids")):
            raise SystemExit(f"{TITLES[name]} gives other ids than Surefoot")
    lines = [f"ids: equal in all {len(ours['offsets']) - 1:,} rows, for every subject"]
    newline = ours["ids"][ours["offsets"][1] - 1]
    for name in ("llamafactory", "datasets"):
        theirs = found[name]
        differs = np.flatnonzero(ours["labels"] != theirs["labels"])
        ends = np.isin(differs, ours["offsets"][1:] - 1)
        only_theirs = (ours["labels"][differs] == -100) & (theirs["labels"][differs] == newline)
        if not (ends & only_theirs).all():
            raise SystemExit(f"{TITLES[name]} gives other labels than Surefoot")
        where = "the line break after the end-of-turn token is learnt in"
        what = f"{where} {len(differs):,} rows" if len(differs) else "equal in all rows"
        lines.append(f"labels of {TITLES[name]}: {what}")
    return lines


def show(bench: Bench, tokens: int) -> str:
    """The report's tables."""
    parts = []
    for title, samples in (("cold", bench.cold), ("cached", bench.cached)):
        head = [
            title,
            "1000 tokens/s",
            "1000 tokens per CPU s",
            "wall s",
            "CPU s",
            "wall, times ours",
            "CPU, times ours",
        ]
        ours = samples["surefoot"]
        rows = [
            [
                TITLES[name],
                measure.rate(tokens, [s.wall for s in taken]),
                measure.rate(tokens, [s.cpu for s in taken]),
                measure.spread([s.wall for s in taken]),
                measure.spread([s.cpu for s in taken]),
                measure.ratio([s.wall for s in ours], [s.wall for s in taken]),
                measure.ratio([s.cpu for s in ours], [s.cpu for s in taken]),
            ]
            for name, taken in samples.items()
            if taken
        ]
        parts.append(measure.table(head, rows))
    return "\n\n".join(parts)


def main() -> None:
    """Make the inputs, check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--cutoff-len", type=int, default=512)
    options = parser.parse_args()
    peers.ensure()
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), options.cutoff_len)
        say(f"making {options.rows:,} rows and a tokenizer of them")
        rows = inputs.make_dataset(bench.folder / "inputs", options.rows)
        inputs.make_model(bench.folder / "inputs", rows)
        say("checking that all give the same")
        tokens, findings = bench.check()
        before = measure.machine()
        bench.measure(options.repetitions)
        print(f"{before}\n{measure.versions('surefoot', 'transformers', 'tokenizers', 'datasets')}")
        print(peers.versions("llamafactory", "transformers", "tokenizers", "datasets"))
        print(f"{len(rows):,} rows, {tokens:,} tokens, cutoff_len {options.cutoff_len}")
        print("\n".join(findings), show(bench, tokens), f"after: {measure.machine()}", sep="\n\n")


if __name__ == "__main__":
    main()
