"""``trackers/NAME.json``: the id of the run in a tracker, and which lines it has.

A resumed run repeats steps. If their lines in ``metrics.jsonl`` are the same, nothing is sent
twice, as the position in the file is known. If they differ, the tracker keeps what it got first,
since none of them can take back a value; a run whose first line differs is another curve.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ....storage.files import read_json, write_aside
from ..follower import Follower, record

Key = tuple[int, bool]  # step, and whether the line is of an evaluation
FOLDER = "trackers"


@dataclass
class Sent:
    """What one tracker has. ``is_other`` and ``repeated`` are of this launch."""

    path: Path
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    step: int = -1
    is_eval: bool = False
    lines: int = 0
    first: str = ""
    position: int = 0
    proof: str = ""

    @classmethod
    def read(cls, path: Path) -> Sent:
        """The file, or that of a run that the tracker does not have yet."""
        try:
            found = read_json(path)
            known = cls(path, **{name: found[name] for name in _FIELDS})
        except (OSError, ValueError, TypeError, KeyError):
            return cls(path)
        return known if known.lines else cls(path, known.id)

    def write(self) -> None:
        """Write the file. Raises ``OSError``."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {name: value for name, value in asdict(self).items() if name != "path"}
        write_aside(self.path, json.dumps(content).encode())

    def follower(self, metrics: Path) -> Follower:
        """Reads from the first line that was not sent."""
        return Follower(metrics, self.position, self.proof.encode())

    def is_another(self, lines: list[bytes]) -> bool:
        """Whether the whole file, in ``lines``, is of another curve."""
        return bool(lines and self.first) and lines[0].decode() != self.first

    def new(self, lines: list[bytes]) -> Iterator[dict[str, object]]:
        """The records that the tracker lacks; each counts as sent once the next is requested."""
        for line in lines:
            row = record(line)
            if row is None or key_of(row) <= (self.step, self.is_eval):
                continue
            yield row
            self.step, self.is_eval = key_of(row)
            self.lines += 1
            self.first = self.first or line.decode()


_FIELDS = ("id", "step", "is_eval", "lines", "first", "position", "proof")


def key_of(row: dict[str, object]) -> Key:
    """Step and kind of a record; training comes before the evaluation of its step."""
    return int(str(row["step"])), "loss" not in row
