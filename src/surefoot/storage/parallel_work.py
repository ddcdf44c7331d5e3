"""Run reads, writes or transfers in parallel; the first error ends them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_parallel(work: Callable[[T], object], items: Iterable[T], workers: int) -> None:
    """``work(item)`` for every item; items that have not begun when one fails are not done."""
    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(work, item) for item in items]
        try:
            for done in running:
                done.result()
        finally:
            pool.shutdown(cancel_futures=True)
