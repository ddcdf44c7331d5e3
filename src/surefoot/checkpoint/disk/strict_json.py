"""JSON from an untrusted file: bounded in size, depth and number of values, without duplicate keys.

Python's own reader accepts duplicate keys, NaN and unlimited nesting, and a list of empty lists
needs thirty times its text in memory. Here all of that is a ``CheckpointError`` before it costs
memory.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...storage import files

MAX_BYTES = 128 << 20  # of a manifest: about 400,000 pieces
MAX_VALUES = 8_000_000  # under 1 GiB once parsed
MAX_DEPTH = 200

_STRING = re.compile(rb'"[^"]*+"?')  # possessive: linear on any input
_NESTING = re.compile(rb"[^\[\]{}]+")


def parse(data: bytes, where: str, *, allow_nan: bool = False) -> Any:
    """Parse ``data`` of the file ``where``; ``allow_nan`` accepts NaN and Infinity."""
    _bound(data, where)
    constant = float if allow_nan else _no_constant
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_no_twins, parse_constant=constant
        )
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError too
        raise CheckpointError(f"{where}: not valid JSON: {error}") from error


def parse_object(data: bytes, where: str, *, allow_nan: bool = False) -> dict[str, Any]:
    """The same, where only an object is valid."""
    parsed = parse(data, where, allow_nan=allow_nan)
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found a {type(parsed).__name__}")
    return parsed


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    with files.open_file(path) as file:
        return parse_object(files.read_all(file, MAX_BYTES), str(path))


def dump(value: object, *, indent: int | None = None) -> bytes:
    """JSON with sorted keys, without anything that other readers reject."""
    text = json.dumps(value, sort_keys=True, indent=indent, allow_nan=False)
    return text.encode() + b"\n"


def _bound(data: bytes, where: str) -> None:
    if len(data) > MAX_BYTES:
        raise CheckpointError(
            f"{where}: {len(data)} bytes of JSON, more than the {MAX_BYTES} allowed"
        )
    # Backslashes in pairs go first: after two of them, a quote ends the text.
    bare = _STRING.sub(b"", data.replace(b"\\\\", b"").replace(b'\\"', b""))
    values = bare.count(b",") + bare.count(b"[") + bare.count(b"{")
    if values > MAX_VALUES:
        raise CheckpointError(f"{where}: {values} values, more than the {MAX_VALUES} allowed")
    depth = 0
    for bracket in _NESTING.sub(b"", bare):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise CheckpointError(f"{where}: nested deeper than {MAX_DEPTH}")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        twin = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twin[:80]!r} occurs twice")
    return members


def _no_constant(name: str) -> float:
    raise ValueError(f"JSON has no number {name}")


def finite(value: object) -> object:
    """``value`` with null in place of NaN and infinities, which strict JSON does not support."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value
