"""Shares: several processes encode a dataset, each every n-th batch of its rows.

The Rust tokenizer has threads, but 40 % of the work is Python: one process cannot use more than two
and a half cores. A process reads all rows and encodes its own, so no row is sent, and the one that
has started it appends what they send in the order of the rows: what is encoded is the same to the
byte, whatever their number. A start takes seconds, which small data would not repay, so it begins
alone. A process that would encode something else, does not start, or ends, leaves its rows to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import IO, TypeVar

from ...log import fell_back
from ...storage.cgroups import usable_cores
from ...storage.child import Child

logger = logging.getLogger(__name__)

ALONE_SECONDS = 10.0  # of encoding, before other processes are started
LEAST_CORES = 4  # with fewer, the threads of one process are as fast
MAX_SHARES = 8  # each takes 0.35 GB, and reads all rows, which is 8 % of the work
PIPE_BYTES = 1 << 20  # a batch of 256 rows fits, so a process goes on before it is read

StartShare = Callable[[int, int], Child]  # by the number of the share, and how many there are
Batch = TypeVar("Batch")


def num_shares() -> int:
    """How many processes may encode on the cores that this one may use; 1: none but this."""
    cores = usable_cores()
    return 1 if cores < LEAST_CORES else min(cores, MAX_SHARES)


class Shares:
    """The other processes that encode a dataset, once they are ready."""

    def __init__(
        self, start: StartShare, name: str, fingerprint: str, count: int, after: float
    ) -> None:
        """
        Args:
            start: starts the process of a share. It sends ``{"fingerprint": ...}``, reads
                ``{"first_row": ...}``, and sends its batches behind that row.
            name: of the dataset, for messages.
            fingerprint: of all that its items depend on; a process with another one is not used.
            count: how many processes.
            after: seconds from now until they are started.
        """
        self._start, self._name, self._fingerprint = start, name, fingerprint
        self._count = count if count > 1 else 0
        self._at = time.monotonic() + after
        self._children: list[Child] = []
        self._num_ready = 0
        self.is_done = False  # whether they have encoded all rows

    def __enter__(self) -> Shares:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def are_ready(self) -> bool:
        """Whether all of them wait for the first row. Starts them if it is time."""
        if not self._count or time.monotonic() < self._at:
            return False
        try:
            if not self._children:
                logger.info("encoding %s: starting %d processes", self._name, self._count)
            while len(self._children) < self._count:
                self._children.append(self._start(len(self._children), self._count))
            for child in self._children[self._num_ready :]:
                if (hello := child.answer(0.0)) is None:
                    return False
                if hello["fingerprint"] != self._fingerprint:
                    self._give_up("would encode something else")
                    return False
                self._num_ready += 1
        except (OSError, EOFError) as error:  # too little memory, say, or a stage of the user's own
            self._give_up(f"did not start{f': {error}' if str(error) else ''}")
            return False
        return True

    def batches(self, first_row: int, read: Callable[[IO[bytes]], Batch | None]) -> Iterator[Batch]:
        """What they encode from ``first_row`` on, in the order of the rows, by ``read``, which
        returns None at the end of the rows and raises ``EOFError`` if the process has ended. Ends
        early if one has; then ``is_done`` is False."""
        for child in self._children:
            pipe = child.process.stdout
            assert pipe is not None
            with contextlib.suppress(OSError, AttributeError):  # over a limit; Linux alone can
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            child.send({"first_row": first_row})
        for child in cycle(self._children):
            assert child.process.stdout is not None
            try:
                batch = read(child.process.stdout)
            except EOFError:
                self._give_up("ended")
                return
            if batch is None:
                self.is_done = True
                return
            yield batch

    def _give_up(self, why: str) -> None:
        what = f"encoding {self._name}: this process alone encodes the rest"
        fell_back(what, f"another one {why}", "takes longer")
        self._count = 0
        self._end()

    def _end(self) -> None:
        for child in self._children:
            child.end()
