"""A part of a long ``metrics.jsonl``, read in milliseconds, until all of it is read.

Whole lines from places at equal distances, and the end. What is in it is exact; what is between is
missing, and with it spikes and metrics that are logged rarely. So an answer says that it is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...storage.files import open_inside
from ...training.callbacks.follower import record
from .metrics_file import MetricsFile

_PLACES = 300
_SPAN, _TAIL = 1 << 12, 1 << 16  # bytes at a place, and at the end
_MAX_SPAN = 1 << 18


@dataclass(frozen=True)
class MetricsExcerpt:
    """Some lines of a file, as if they were all, and the same file as it is being read."""

    metrics: MetricsFile
    whole: MetricsFile

    def facts(self) -> dict[str, object]:
        """For a browser: how many lines these are, and the share of the file that is read."""
        return {"lines": self.metrics.num_rows, "read": self.whole.share_read()}


def excerpt_of(whole: MetricsFile) -> MetricsExcerpt:
    """Lines of a file that is not read yet. A missing file has none."""
    found = MetricsFile(whole.path)
    for line in _lines(whole.path):
        if (row := record(line)) is not None:
            found.num_rows += 1
            found.put_row(row)
    return MetricsExcerpt(found, whole)


def _lines(path: Path) -> Iterator[bytes]:
    """Whole lines, in their order, none twice."""
    try:
        with open_inside(path.parent, path.name) as file:
            size = file.size
            tail, end = max(0, size - _TAIL), 0
            span = _span(file.read_up_to(0, _TAIL))
            for number in range(_PLACES + 1):
                at = max(end, tail * number // _PLACES)
                data = file.read_up_to(at, _TAIL if number == _PLACES else span)
                begin = 0 if at == end else data.find(b"\n") + 1  # what was begun is no line
                last = data.rfind(b"\n") + 1
                yield from data[begin:last].split(b"\n")[:-1]
                end = at + last if last else end
    except OSError:
        return


def _span(first: bytes) -> int:
    """Bytes at a place: enough for some lines."""
    length = len(first) // (first.count(b"\n") + 1)
    return min(_MAX_SPAN, max(_SPAN, 4 * length))
