"""The hash of everything that is kept: xxh3 with 128 bits, as 32 hexadecimal digits."""

from __future__ import annotations

import xxhash


class Hash:
    """xxh3-128, fed piece by piece; equal to hashing the bytes in one go."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: bytes | memoryview) -> None:
        """Add ``data``."""
        self._state.update(data)

    def hex(self) -> str:
        """The 32 hexadecimal digits of what was added so far."""
        return self._state.hexdigest()


def digest(data: bytes | memoryview) -> str:
    """xxh3-128 of ``data`` as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)
