"""Replicas learn together that a forward pass of one of them does not fit in memory.

A replica has all weights, so its forward pass meets no other rank before gradients are reduced in
the backward pass. A vote between the two lets all replicas leave the step at the same place. Ranks
that share weights (``dp_shard``, ``tp``, ``pp``) meet in every layer; for them there is no such
place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..storage.memory import allocator_message, is_out_of_memory
from .world import World


class AgreedShortageError(MemoryError):
    """Memory did not suffice on some rank; all ranks raise this at the same place."""


@contextlib.contextmanager
def vote_on_memory(world: World) -> Iterator[None]:
    """Run a forward pass in the block. Raises ``AgreedShortageError`` on all ranks if one of them
    runs out of memory in it. Does nothing unless all ranks are replicas."""
    if not world.has_replicas_only:
        yield
        return
    shortage = None
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        shortage = allocator_message(error)
    if world.largest([float(shortage is not None)])[0]:
        raise AgreedShortageError(shortage or "out of memory on another rank")
