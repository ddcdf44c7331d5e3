"""The hash of all stored bytes: XXH3 with 128 bits, as 32 hexadecimal digits."""

from __future__ import annotations

import xxhash


class Hash:
    """Incremental xxh3-128; equal to hashing all bytes at once."""

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
