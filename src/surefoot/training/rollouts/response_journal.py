"""Responses of a server on the disk, before anything is trained on them.

RUN/sampled/window-EPOCH-INDEX-after-STEP.jsonl     one response per line

A server does not sample the same responses twice. So each is flushed as it arrives, and a run that
is resumed before the window reads it again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...checkpoint.disk.commit import committed, step_of
from ...errors import RunError
from ...generate.samples import Sample
from ...storage import files

FOLDER = "sampled"  # in that of the run
_NAME = re.compile(r"window-\d+-\d+-after-(\d+)\.jsonl")
_LIMIT = 1 << 34  # bytes that are read back


@dataclass(frozen=True)
class ResponseJournal:
    """The responses of one window, sampled with the weights after ``version`` optimizer steps."""

    run: Path
    place: tuple[int, int]  # of the window
    version: int

    @property
    def path(self) -> Path:
        """Its file."""
        epoch, index = self.place
        return self.run / FOLDER / f"window-{epoch}-{index}-after-{self.version}.jsonl"

    def read(self, key: str) -> dict[int, Sample]:
        """The responses to requests of this ``key``, by index. Raises ``RunError``."""
        with files.raising(RunError, "cannot read the responses of a window"):
            if not files.exists(self.path):
                return {}
            with files.open_file(self.path) as file:
                text = files.read_all(file, _LIMIT).decode(errors="replace")
        return {row["index"]: _sample(row) for row in _rows(text) if row["key"] == key}

    def add(self, key: str, found: Mapping[int, Sample]) -> None:
        """Append responses, and flush them. Raises ``RunError``."""
        lines = [json.dumps({"key": key, "index": i, **asdict(s)}) for i, s in found.items()]
        with files.raising(RunError, "cannot write the responses of a window"):
            files.make_folder(self.path.parent)
            # a line break first, which ends a line that a crash has cut short
            files.append_line(self.path, "\n".join(["", *lines]))
            with files.open_file(self.path) as file:
                file.sync()

    def forget_older(self) -> None:
        """Delete the files of windows from which no checkpoint of the run would be resumed."""
        with files.raising(RunError, "cannot delete the responses of old windows"):
            folder, saved = self.run / FOLDER, [step_of(path) for path in committed(self.run)]
            for name in files.names_in(folder) if saved else ():
                match = _NAME.fullmatch(name)
                if match and int(match[1]) < min(saved):
                    files.remove_tree(folder / name)


def key_of(lineage: str, prompts: Sequence[Sequence[int]], settings: object, turn: int) -> str:
    """What responses depend on besides the weights of a run with these settings (``lineage``)."""
    told = [lineage, [list(map(int, prompt)) for prompt in prompts], settings, turn]
    return files.digest(json.dumps(told).encode())


def _rows(text: str) -> Iterator[dict[str, Any]]:
    """The complete lines."""
    for line in text.split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.keys() >= {"key", "index", "ids", "logps"}:
            yield row


def _sample(row: Mapping[str, Any]) -> Sample:
    ids, logps, log_masses = (tuple(row[name]) for name in ("ids", "logps", "log_masses"))
    return Sample(ids, logps, row["finish_reason"], log_masses, version=row["version"])
