"""A bar on standard error for work of known length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]


@contextmanager
def progress(title: str, total: int, *, is_shown: bool = True) -> Iterator[Advance]:
    """The bar, if that is a terminal; it leaves nothing behind."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    is_off = not (is_shown and console.is_terminal)
    with Progress(console=console, transient=True, disable=is_off) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)
