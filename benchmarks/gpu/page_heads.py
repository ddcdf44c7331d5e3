"""The tables of output heads: a row for each subject, times by the number of tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cases import TITLES
from results import Record

ERRORS = {
    "loss_error": "loss",
    "hidden_error": "hidden gradient",
    "weight_error": "matrix gradient",
}
ROW = re.compile(r"(?P<name>head .*, (trained|frozen)), (?P<tokens>[\d,]+) tokens")
Table = tuple[str, list[str], list[list[str]]]  # title, head, rows


def tables(records: Sequence[Record]) -> Iterator[Table]:
    """One for each size of the head, with a trained and with a frozen matrix."""
    found: dict[str, dict[tuple[str, int], Record]] = {}
    for record in records:
        row = ROW.fullmatch(str(record["case"]))
        if row is not None:
            count = int(row["tokens"].replace(",", ""))
            found.setdefault(f"{row['name']} matrix", {})[str(record["subject"]), count] = record
    for name, by in found.items():
        counts = sorted({count for _, count in by})
        head = ["", *(f"ms, {count:,} tokens" for count in counts)]
        head += [f"peak GB, {counts[-1]:,} tokens", "TFLOP/s there"]
        head += [f"error of {title}" for title in ERRORS.values()]
        subjects = [name for name in TITLES if any(subject == name for subject, _ in by)]
        yield name, head, [_row(subject, counts, by) for subject in subjects]


def _row(subject: str, counts: Sequence[int], by: Mapping[tuple[str, int], Record]) -> list[str]:
    """The cells of one subject; a status in place of a time that is not there."""
    cells, last = [TITLES[subject]], _figures(by.get((subject, counts[-1])))
    errors: dict[str, float] = {}
    for count in counts:
        record = by.get((subject, count))
        figures = _figures(record)
        errors |= {name: figures[name] for name in ERRORS if name in figures}
        is_ok = record is not None and record["status"] == "ok"
        cells.append(f"{figures['ms']:,.1f}" if is_ok else str(record["status"]) if record else "")
    cells.append(f"{last['peak_mb'] / 1024:,.2f}" if "peak_mb" in last else "")
    cells.append(f"{last['tflops']:,.0f}" if "tflops" in last else "")
    return [*cells, *(f"{errors[name]:.1e}" if name in errors else "" for name in ERRORS)]


def _figures(record: Record | None) -> Mapping[str, Any]:
    return record["figures"] if record else {}  # type: ignore[return-value]
