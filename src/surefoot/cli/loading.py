"""Import heavy packages without garbage collections, and start the ranks that need them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..parallel.section import ParallelSection
    from ..recipe.recipe import Recipe


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


def start_ranks(
    parallel: ParallelSection,
    more: Sequence[str] = (),
    check: Callable[[int], None] = lambda _: None,
) -> None:
    """If several ranks are to run this command line, with ``more`` words, start them, and exit as
    they do. ``check`` gets their number before, and raises what each of them would raise."""
    with loading():
        from ..parallel.launcher import launch, num_processes, rerun_command

    if (count := num_processes(parallel)) > 1:
        check(count)
        raise SystemExit(
            launch(rerun_command([*sys.argv[1:], *more]), count, parallel.max_restarts)
        )


def resolved_recipe(path: Path, overrides: Sequence[str]) -> Recipe:
    """The recipe at ``path``, with what it names found. What is wrong with it is reported before
    the slow imports."""
    from ..recipe.recipe import load
    from ..run.resolving import resolved

    return resolved(load(path, overrides))
