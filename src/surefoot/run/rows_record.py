"""A hash of each training row, eight bytes, written once a run: so that a resume on other rows is
refused with the rows that were edited, added, removed or moved, and not only with a fingerprint.

rows.xxh     a line of JSON (rows of each dataset, what encoded them), then hashes, little-endian
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..data.store.cache import RowHashes
from ..data.store.dataset import EncodedDataset
from ..data.text.codec import Codec
from ..errors import DataError, counted
from ..storage import files

NAME = "rows.xxh"
_SHOWN = 4  # changes that a message has
_MOST = 5000  # rows that are aligned; in more, changes are counted
_MAX_BYTES = 1 << 33


@dataclass(frozen=True)
class RowsRecord:
    """What the training rows of a run were."""

    data: str  # fingerprint of the encoded rows in their order
    hashes: Mapping[str, RowHashes]  # by dataset
    codec: str  # fingerprint of what encoded them
    template: str  # the text of the chat template

    @classmethod
    def of(cls, data: EncodedDataset, names: Sequence[str], codec: Codec) -> RowsRecord:
        """That of the encoded datasets ``names``."""
        hashes = (store.row_hashes() for store in data.stores)
        by_name = dict(zip(names, hashes, strict=True))
        return cls(data.fingerprint, by_name, codec.fingerprint, codec.template_text)

    @classmethod
    def read(cls, folder: Path) -> RowsRecord | None:
        """That in the folder of a run; None if it has none, or one that cannot be read."""
        with suppress(OSError, ValueError, LookupError):
            head, _, body = files.read_inside(folder, NAME, _MAX_BYTES).partition(b"\n")
            header: dict[str, Any] = json.loads(head)
            ends = np.cumsum(list(header["datasets"].values()))
            parts = np.split(np.frombuffer(body, "<u8"), ends[:-1])
            hashes = dict(zip(header["datasets"], parts, strict=True))
            return cls(header["data"], hashes, header["codec"], header["template"])
        return None

    def write(self, folder: Path) -> None:
        """Write it; without room it is not written, and a refusal says less."""
        sizes = {name: len(values) for name, values in self.hashes.items()}
        header = {"data": self.data, "datasets": sizes, "codec": self.codec}
        header["template"] = self.template
        body = b"".join(values.astype("<u8").tobytes() for values in self.hashes.values())
        with suppress(OSError):
            files.write_aside(folder / NAME, json.dumps(header).encode() + b"\n" + body)

    def changes(self, now: RowsRecord) -> Iterator[str]:
        """What has become of it, in words."""
        if self.template != now.template:
            yield f"the chat template has changed: {_changed_line(self.template, now.template)}"
        elif self.codec != now.codec:
            yield "the tokenizer of the model has changed"
        else:
            for name, before in self.hashes.items():
                yield from _changes(name, before, now.hashes.get(name, before[:0]))


def compare_rows(
    data: EncodedDataset, names: Sequence[str], codec: Codec, folder: Path, start: Path | None
) -> None:
    """Record the training rows of a run in ``folder`` that begins. Raises ``DataError`` if it
    resumes from the checkpoint ``start``, and is on other rows than that run, with these rows."""
    before = None if start is None else RowsRecord.read(start.parent)
    if start is not None and before is not None and before.data != data.fingerprint:
        found = list(before.changes(RowsRecord.of(data, names, codec)))
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        if found:
            raise DataError(
                f"cannot resume from {start.name}: {'; '.join(found[:_SHOWN])}{more} (the first "
                "row is 0). Restore that, or start a new run from its weights in another "
                "train.output_dir (model.path, or model.adapter for an adapter)"
            )
    if start is None or not files.exists(folder / NAME):
        (before or RowsRecord.of(data, names, codec)).write(folder)


def _changed_line(before: str, now: str) -> str:
    """The first line of a text that is another one."""
    old, new = (text.splitlines() or [""] for text in (before, now))
    pairs = enumerate(zip([*old, ""], [*new, ""], strict=False), 1)
    line, (was, is_now) = next((p for p in pairs if p[1][0] != p[1][1]), (1, (old[0], new[0])))
    return f"line {line} was {was.strip()[:120]!r} and is {is_now.strip()[:120]!r}"


def _changes(name: str, before: RowHashes, now: RowHashes) -> Iterator[str]:
    """The rows of one dataset, the first of which is 0."""
    size = min(len(before), len(now))
    start = int(np.argmax(np.append(before[:size] != now[:size], True)))
    rest = size - start
    ends = np.append(before[len(before) - rest :][::-1] != now[len(now) - rest :][::-1], True)
    end = int(np.argmax(ends))
    old, new = (rows[start : len(rows) - end].tolist() for rows in (before, now))
    if not old and not new:
        return
    if Counter(old) == Counter(new):
        places = [start + i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
        if len(places) == 2:
            yield f"rows {places[0]} and {places[1]} of {name} have changed places"
        elif old[1:] == new[:-1] or new[1:] == old[:-1]:
            ways = (places[0], places[-1]) if old[1:] == new[:-1] else (places[-1], places[0])
            yield f"row {ways[0]} of {name} was moved to {ways[1]}"
        else:
            yield f"rows {places[0]} to {places[-1]} of {name} are in another order"
        return
    if max(len(old), len(new)) > _MOST:
        gone, more = Counter(old) - Counter(new), Counter(new) - Counter(old)
        rows = f"rows {start} to {start + len(old) - 1} of {name}"
        yield f"of {rows}, {gone.total():,} are gone and {more.total():,} are new"
        return
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for kind, a, a_end, b, b_end in matcher.get_opcodes():
        edited = min(a_end - a, b_end - b) if kind == "replace" else 0
        if edited:
            yield f"{_rows(start + a, edited)} of {name} {_was(edited)} edited"
        if (count := a_end - a - edited) > 0 and kind != "equal":
            yield f"{_rows(start + a + edited, count)} of {name} {_was(count)} removed"
        if (count := b_end - b - edited) > 0 and kind != "equal":
            at = start + b + edited
            yield f"{counted(count, 'row')} {_was(count)} added to {name}, as {_rows(at, count)}"


def _rows(first: int, count: int) -> str:
    return f"row {first}" if count == 1 else f"rows {first} to {first + count - 1}"


def _was(count: int) -> str:
    return "was" if count == 1 else "were"
