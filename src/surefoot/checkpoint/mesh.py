"""A mesh of processes, and which boxes of a tensor they hold.

The cuts are FSDP2's: along the first dimension, by the rule of ``torch.chunk``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields

from ..cuts import chunk
from ..errors import CheckpointError
from .box import Box

_EXAMPLE = "for example dp_shard=4,dp_replicate=2"
_MOST = 65_536  # processes: their folders have five digits


@dataclass(frozen=True)
class Mesh:
    """``dp_replicate`` copies of a model, each cut over ``dp_shard`` processes."""

    dp_replicate: int = 1
    dp_shard: int = 1

    def __post_init__(self) -> None:
        for axis, size in asdict(self).items():
            if size < 1:
                raise CheckpointError(f"mesh: {axis} must be at least 1, got {size}")
        if self.size > _MOST:
            raise CheckpointError(f"mesh: {self.size:,} processes are more than {_MOST:,}")

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.dp_replicate * self.dp_shard

    @property
    def axes(self) -> dict[str, int]:
        """The size of every axis, in order; none for a process alone, as a run says it."""
        return asdict(self) if self.size > 1 else {}

    def boxes(self, shape: tuple[int, ...], copy: int) -> Iterator[tuple[int, Box]]:
        """The ranks of one ``copy`` of the model, and their boxes of a tensor; empty ones are left
        out. A tensor without dimensions or elements is whole everywhere, and the first rank's."""
        whole = Box.whole(shape)
        if not shape or not whole.size:
            yield 0, whole
            return
        for shard in range(self.dp_shard):
            first, length = chunk(shape[0], self.dp_shard, shard)
            if not length:
                return
            box = Box((first, *whole.start[1:]), (length, *shape[1:]))
            yield copy * self.dp_shard + shard, box


def parse_mesh(text: str) -> Mesh:
    """What ``dp_shard=4,dp_replicate=2`` says. Raises ``CheckpointError`` for anything else."""
    known = [field.name for field in fields(Mesh)]
    sizes: dict[str, int] = {}
    for item in text.split(","):
        axis, _, size = (part.strip() for part in item.partition("="))
        if axis not in known:
            near = difflib.get_close_matches(axis, known, n=1)
            hint = f"did you mean {near[0]}?" if near else _EXAMPLE
            raise CheckpointError(
                f"mesh {text!r}: a checkpoint is cut along {' and '.join(known)}, not {axis!r}; "
                f"{hint}"
            )
        if axis in sizes:
            raise CheckpointError(f"mesh {text!r}: {axis} occurs twice")
        if not (size.isascii() and size.isdecimal() and len(size) < 10):
            raise CheckpointError(
                f"mesh {text!r}: {axis} must be a whole number, got {size!r}; {_EXAMPLE}"
            )
        sizes[axis] = int(size)
    return Mesh(**sizes)
