"""What a run has generated: sampled responses of evaluations, and answers of ``surefoot eval``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ...storage.files import open_inside
from .run_state import parsed

MAX_BYTES = 8 << 20
MAX_ROWS = 64
_ROLLOUTS = re.compile(r"rollouts-(\d+)\.jsonl")
_GENERATIONS = re.compile(r"generations-([\w.-]+)\.jsonl")
_STEP = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class SampleFile:
    """A file of samples of one step; ``step`` is None if the name does not say."""

    name: str
    kind: str  # rollouts or generations
    label: str
    step: int | None


def sample_files(folder: Path) -> list[SampleFile]:
    """The files of samples of a run, in the order of steps."""
    found = [one for path in folder.iterdir() if (one := _sample_file(path.name))]
    return sorted(found, key=lambda one: (one.step is None, one.step or 0, one.name))


def read_samples(folder: Path, name: str) -> dict[str, object]:
    """The first rows of a file, and how many lines are no rows."""
    known = {one.name: one for one in sample_files(folder)}
    if name not in known:
        return {"rows": [], "broken": 0, "is_cut": False}
    with open_inside(folder, name) as file:
        is_cut = file.size > MAX_BYTES
        data = file.read_up_to(0, MAX_BYTES)
    lines = data.split(b"\n")
    rest = lines.pop()
    rows = [parsed(line) for line in lines[:MAX_ROWS]]
    broken = sum(row is None for row in rows) + (1 if rest and not is_cut else 0)
    shown = [_short(row) for row in rows if row is not None]
    return {"rows": shown, "broken": broken, "is_cut": is_cut or len(lines) > MAX_ROWS}


def _sample_file(name: str) -> SampleFile | None:
    if found := _ROLLOUTS.fullmatch(name):
        return SampleFile(name, "rollouts", found[1], int(found[1]))
    if found := _GENERATIONS.fullmatch(name):
        step = _STEP.fullmatch(found[1])
        return SampleFile(name, "generations", found[1], int(step[1]) if step else None)
    return None


def _short(row: dict[str, object]) -> dict[str, object]:
    """A row without what no page shows."""
    row.pop("prompt_ids", None)
    tokens = row.get("tokens")
    if isinstance(tokens, list):
        row["tokens"] = tokens[:2000]
    return row
