"""Options with several settings in one text, such as ``dp_shard=4,tp=2``, parsed to their types."""

from __future__ import annotations

from dataclasses import fields

from ..errors import CheckpointError
from ..parallel.sharding import Mesh
from ..schema.named_values import pairs

_MESH = "for example dp_shard=4,tp=2"


def parse_mesh(text: str) -> Mesh:
    """``dp_shard=4,dp_replicate=2`` to a mesh. Raises ``CheckpointError`` for anything else."""
    known = [field.name for field in fields(Mesh)]
    odd = f"a checkpoint is sharded along {', '.join(known[:-1])} and {known[-1]}, not {{}}"
    sizes: dict[str, int] = {}
    for axis, size in pairs(text, known, option="mesh", odd=odd, example=_MESH):
        if not (size.isascii() and size.isdecimal() and len(size) < 10):
            raise CheckpointError(
                f"mesh {text!r}: {axis} must be a whole number, got {size!r}; {_MESH}"
            )
        sizes[axis] = int(size)
    return Mesh(**sizes)
