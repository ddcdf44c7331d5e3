"""Import heavy packages without garbage collections."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Import inside; the garbage collector is off, and later skips what has been imported.

    torch and transformers make about a million objects, all of which stay. Every collection amid
    them walks those that are there already: a fifth of the processor time until a model trains.
    ``freeze`` sets them aside for good, so that collections during training are short as well.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
