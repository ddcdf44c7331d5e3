"""Out of memory in a run: an error that says what uses less, in place of the allocator's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..errors import RunError
from ..training.trainer import Trainer

_SIGNS = ("out of memory", "can't allocate memory", "not enough memory")  # of torch, lower case


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is an allocation that failed, on a GPU or in main memory."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)


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
            f"({_short(error)}). Latest checkpoint: {newest}. Lower train.micro_batch_size or set "
            "model.gradient_checkpointing: true, then run the same command to resume; "
            "`surefoot plan` estimates the memory that a recipe needs"
        ) from error


def _short(error: BaseException) -> str:
    """The allocator's message without its advice, which may be many lines."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].partition(" Including non-PyTorch")[0].removesuffix(".")
