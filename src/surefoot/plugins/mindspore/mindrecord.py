"""Rows of a MindRecord file, which MindSpore itself reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...errors import DataError

_SCRIPT = """\
import json, sys
from mindspore.mindrecord import FileReader

def plain(value):
    value = value.tolist() if hasattr(value, "tolist") else value
    return value.decode() if isinstance(value, bytes) else value

with open(sys.argv[2], "w", encoding="utf-8") as out:
    for row in FileReader(sys.argv[1]).get_next():
        out.write(json.dumps({name: plain(value) for name, value in row.items()}) + "\\n")
"""


def read_rows(path: Path) -> Iterator[dict[str, object]]:
    """The rows, with lists for arrays and text for bytes. Raises ``DataError``: MindSpore is not
    installed, or cannot read the file."""
    try:
        from mindspore.mindrecord import FileReader  # type: ignore[import-not-found]
    except ImportError:
        raise DataError(
            f"{path}: MindRecord is read by the package mindspore, which is not installed here. "
            "Where it is, this script writes the rows (python script.py IN.mindrecord OUT.jsonl):"
            f"\n\n{_SCRIPT}"
        ) from None
    try:
        for row in FileReader(str(path)).get_next():
            yield {name: _plain(value) for name, value in row.items()}
    except (RuntimeError, ValueError) as error:
        raise DataError(f"{path}: MindSpore cannot read it: {error}") from None


def _plain(value: object) -> object:
    value = value.tolist() if hasattr(value, "tolist") else value
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
