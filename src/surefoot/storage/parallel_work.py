"""Run reads, writes or transfers in parallel, or ahead; the first error ends them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
_AHEAD = 2  # results that wait to be taken


def in_parallel(work: Callable[[T], object], items: Iterable[T], workers: int) -> None:
    """``work(item)`` for every item; items that have not begun when one fails are not done."""
    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(work, item) for item in items]
        try:
            for done in running:
                done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def ahead(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """``work(item)`` for every item, in order, computed in a thread while earlier ones are used."""
    with ThreadPoolExecutor(1) as pool:
        running: deque[Future[R]] = deque()
        try:
            for item in items:
                running.append(pool.submit(work, item))
                if len(running) > _AHEAD:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
