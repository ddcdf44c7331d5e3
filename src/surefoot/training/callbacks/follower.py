"""Follow a file of JSON lines that another process appends to, and detect if it was truncated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...storage.files import File, open_inside, parse_json
from ...terminal_text import plain

BLOCK = 1 << 22  # bytes read at a time
_LONGEST = 1 << 28  # bytes of a line
_PROOF = 256  # bytes before the position that must still be the same


@dataclass
class Follower:
    """Reads the whole lines that were appended to a file since the last time."""

    path: Path
    position: int = 0
    proof: bytes = b""  # what must still be before the position
    _stamp: tuple[int, int, int] = (0, 0, 0)

    def at_end(self) -> Follower:
        """Skip the whole lines that are there, without reading them all."""
        try:
            with open_inside(self.path.parent, self.path.name) as file:
                self.position = _end_of_lines(file)
                start = max(0, self.position - _PROOF)
                self.proof = file.read(start, self.position - start)
        except OSError:
            self.position, self.proof = 0, b""
        return self

    def read(self) -> tuple[list[bytes], bool]:
        """The new lines, and whether the file was cut or replaced, so that these are all lines."""
        lines: list[bytes] = []
        is_other = False
        for block, is_new_file in self.blocks():
            is_other |= is_new_file
            lines += block.split(b"\n")[:-1]
        return lines, is_other

    def blocks(self) -> Iterator[tuple[bytes, bool]]:
        """The same as blocks of whole lines; the first one has whether it begins another file."""
        try:
            with open_inside(self.path.parent, self.path.name) as file:
                if (stamp := file.stamp) == self._stamp:
                    return
                start = self.position - len(self.proof)
                is_other = file.read_up_to(start, len(self.proof)) != self.proof
                if is_other:
                    self.position, self.proof = 0, b""
                self._stamp = stamp
                yield b"", is_other
                yield from ((block, False) for block in self._blocks(file))
        except OSError:
            was_there = self.position > 0
            self.position, self.proof, self._stamp = 0, b"", (0, 0, 0)
            yield b"", was_there

    def _blocks(self, file: File) -> Iterator[bytes]:
        size = BLOCK
        while data := file.read_up_to(self.position, size):
            whole = data.rfind(b"\n") + 1
            if not whole and len(data) == size < _LONGEST:
                size *= 2
                continue
            if not whole:  # an incomplete line, still being written
                break
            self.position += whole
            self.proof = (self.proof + data[max(0, whole - _PROOF) : whole])[-_PROOF:]
            yield data[:whole]
            if len(data) < size:
                break


def _end_of_lines(file: File) -> int:
    """Where the last whole line of a file ends."""
    end = file.size
    while end > 0:
        begin = max(0, end - BLOCK)
        if whole := file.read(begin, end - begin).rfind(b"\n") + 1:
            return begin + whole
        end = begin
    return 0


def record(line: bytes) -> dict[str, object] | None:
    """The record in a line, fit to be shown; None if it is none."""
    try:
        row = plain(parse_json(line))
    except ValueError:
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None
