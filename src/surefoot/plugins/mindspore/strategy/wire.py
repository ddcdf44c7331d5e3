"""The wire format of protocol buffers, as far as strategy files need it. No length is trusted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ....errors import CheckpointError

Value = int | bytes
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_MOST_BYTES = 10  # of a varint: 64 bits by 7


def fields(data: bytes, where: str) -> Iterator[tuple[int, Value]]:
    """The number and value of every field, in order. ``where`` names the file in errors."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at, where)
        number, kind = key >> 3, key & 7
        if not number:
            raise _damaged(where, at)
        value: Value
        if kind == _VARINT:
            value, at = _varint(data, at, where)
        else:
            if kind == _BYTES:
                length, at = _varint(data, at, where)
            elif kind in _FIXED:
                length = _FIXED[kind]
            else:
                raise _damaged(where, at)
            if at + length > len(data):
                raise _damaged(where, at)
            value, at = data[at : at + length], at + length
        yield number, value


def integers(values: Sequence[Value], where: str) -> tuple[int, ...]:
    """A repeated field of signed integers, packed or not."""
    found: list[int] = []
    for value in values:
        if isinstance(value, int):
            found.append(_signed(value))
            continue
        at = 0
        while at < len(value):
            number, at = _varint(value, at, where)
            found.append(_signed(number))
    return tuple(found)


def integer(number: int, value: int) -> bytes:
    """A field of one integer."""
    return _encoded(number << 3 | _VARINT) + _encoded(value)


def packed(number: int, values: Sequence[int]) -> bytes:
    """A field of several integers."""
    return message(number, b"".join(map(_encoded, values)))


def message(number: int, content: bytes) -> bytes:
    """A field of bytes: text, or a message."""
    return _encoded(number << 3 | _BYTES) + _encoded(len(content)) + content


def _varint(data: bytes, at: int, where: str) -> tuple[int, int]:
    value = 0
    for i, byte in enumerate(data[at : at + _MOST_BYTES]):
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value & (1 << 64) - 1, at + i + 1
    raise _damaged(where, at)


def _encoded(value: int) -> bytes:
    left, found = value & (1 << 64) - 1, bytearray()
    while left > 127:
        found.append(left & 127 | 128)
        left >>= 7
    found.append(left)
    return bytes(found)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _damaged(where: str, at: int) -> CheckpointError:
    return CheckpointError(f"{where}: not a strategy file of MindSpore, or damaged at byte {at}")
