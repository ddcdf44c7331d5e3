"""What a run has generated: sampled responses of evaluations, and answers of ``surefoot eval``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ...storage.files import open_inside
from .run_state import parsed

MAX_BYTES = 8 << 20
MAX_ROWS = 64
_FILE = re.compile(r"(rollouts|generations)-((?:checkpoint-)?(\d+)|[\w.-]+)\.jsonl")
_MAX_TOKENS = 2000  # of a response


@dataclass(frozen=True)
class SampleFile:
    """A file of samples of one step; ``step`` is None if the name does not say."""

    name: str
    kind: str  # rollouts or generations
    label: str
    step: int | None


def sample_files(folder: Path) -> list[SampleFile]:
    """The files of samples of a run, in the order of steps."""
    matches = [match for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))]
    found = [SampleFile(m[0], m[1], m[2], int(m[3]) if m[3] else None) for m in matches]
    return sorted(found, key=lambda one: (one.step is None, one.step or 0, one.name))


def read_samples(folder: Path, name: str) -> dict[str, object]:
    """The first rows of a file without what no page shows, and how many lines are no rows."""
    if name not in {one.name for one in sample_files(folder)}:
        return {"rows": [], "broken": 0}
    with open_inside(folder, name) as file:
        is_cut = file.size > MAX_BYTES
        lines = file.read_up_to(0, MAX_BYTES).split(b"\n")
    rest = lines.pop()
    rows = [row for line in lines[:MAX_ROWS] if (row := parsed(line)) is not None]
    broken = len(lines[:MAX_ROWS]) - len(rows) + bool(rest and not is_cut)
    for row in rows:
        row.pop("prompt_ids", None)
        if isinstance(tokens := row.get("tokens"), list):
            row["tokens"] = tokens[:_MAX_TOKENS]
    return {"rows": rows, "broken": broken}
