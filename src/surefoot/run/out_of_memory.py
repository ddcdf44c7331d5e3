"""Out of memory in a run: an error that says what uses less, in place of the allocator's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..errors import RunError
from ..storage.memory import allocator_message, is_out_of_memory
from ..training.trainer import Trainer


@contextlib.contextmanager
def explain_out_of_memory(trainer: Trainer) -> Iterator[None]:
    """Convert a failed allocation of the loop to a ``RunError``. No checkpoint is lost by it: the
    save in flight has its own copy, and has ended when the loop has."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        newest = trainer.saver.newest or "no checkpoint has been saved yet"
        raise RunError(
            f"train.micro_batch_size: step {trainer.state.global_step + 1} ran out of memory "
            f"({allocator_message(error)}). Latest checkpoint: {newest}. Lower "
            "train.micro_batch_size or set model.gradient_checkpointing: true, then run the same "
            "command to resume; `surefoot plan` estimates the memory that a recipe needs"
        ) from error
