"""Marks of progress: what a rank does, and since when, in memory that its watchdog reads; a mark of
waiting, on the stack; and the seconds that each phase has taken, for ``surefoot runs goodput``.

A mark is a number written to shared memory (0.15 us; a change of phase 6 us), which neither
waits for anything nor depends on the watchdog.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from . import _watchdog as marks

P = ParamSpec("P")
T = TypeVar("T")

(STARTING, DATA, TRAINING, EVALUATING, SAVING, CALLBACKS, ENDING, UPLOADING) = range(
    len(marks.PHASES)
)
# The phases in the record of a launch.
PARTS = ("starting", "data", "training", "evaluating", "saving", "callbacks", "ending", "ending")


def wait_for_ranks(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``call(...)``, which returns when other ranks have done their part, or a device on which the
    collectives of ranks run. The frame of this function is the mark: by its name, the watchdog
    tells a rank that waits from one that works."""
    return call(*args, **kwargs)


class Progress:
    """The marks of one rank, made by the thread that trains. Without a file, nobody reads them."""

    def __init__(self, file: int | None = None) -> None:
        """``file`` is a descriptor of at least ``SIZE`` bytes."""
        memory = bytearray(marks.SIZE) if file is None else mmap.mmap(file, marks.SIZE)
        self._memory = memoryview(memory)
        self._words = self._memory[: marks.TEXT_AT].cast("d")
        self._words[marks.MICRO_BATCH] = -1
        self._since, self._cpu = time.monotonic(), time.thread_time()
        self._began: float | None = None  # of a micro-batch
        self._prepared = 0.0

    @contextmanager
    def during(self, phase: int) -> Iterator[None]:
        """A block in another phase, after which the phase before it continues."""
        before = int(self._words[marks.PHASE])
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def enter(self, phase: int) -> None:
        """A phase begins, and the one before it ends."""
        now, cpu, words = time.monotonic(), time.thread_time(), self._words
        at, seconds = marks.PHASES_AT + 4 * int(words[marks.PHASE]), now - self._since
        words[at + marks.SLOWEST] = max(words[at + marks.SLOWEST], seconds)
        words[at + marks.TOTAL] += seconds
        words[at + marks.PROCESSOR] += cpu - self._cpu
        words[marks.PHASE] = phase
        words[marks.MARKS] += 1
        self._since, self._cpu = now, cpu
        self._end_micro_batch(now)

    def allow_long(self, phase: int) -> None:
        """What this phase does may take long at any time: a step that compiles, for one."""
        self._words[marks.PHASES_AT + 4 * phase + marks.ALLOWED] = marks.FIRST

    def step(self, number: int) -> None:
        """An optimizer step begins."""
        self._words[marks.STEP], self._words[marks.MICRO_BATCH] = number, -1
        self._words[marks.TEXT_LENGTH] = 0
        self._words[marks.MARKS] += 1

    def micro_batch(self, index: int, rows: str, num_tokens: int) -> None:
        """A micro-batch begins, which is made of these rows."""
        self._end_micro_batch(now := time.monotonic())
        self._words[marks.TOKENS], self._began = num_tokens, now
        text = rows.encode()[: marks.SIZE - marks.TEXT_AT]
        self._memory[marks.TEXT_AT : marks.TEXT_AT + len(text)] = text
        self._words[marks.TEXT_LENGTH], self._words[marks.MICRO_BATCH] = len(text), index
        self._words[marks.MARKS] += 1

    def _end_micro_batch(self, now: float) -> None:
        """Note the time for each of its tokens, if one has begun."""
        words = self._words
        if self._began is not None and words[marks.TOKENS]:
            words[marks.RATE] = max(words[marks.RATE], (now - self._began) / words[marks.TOKENS])
        self._began = None

    def tick(self) -> None:
        """Something that is counted has been done: a batch of an evaluation, for one."""
        self._words[marks.MARKS] += 1

    def prepared(self, seconds: float) -> None:
        """So long, the last batch was no data that training waited for, but the stage's own
        computing: rollouts, for one."""
        self._prepared += seconds

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds since the start, each in one of ``PARTS``; those that have any."""
        words, seconds = self._words, dict.fromkeys(PARTS, 0.0)
        for phase, part in enumerate(PARTS):
            seconds[part] += words[marks.PHASES_AT + 4 * phase + marks.TOTAL]
        seconds[PARTS[int(words[marks.PHASE])]] += time.monotonic() - self._since
        seconds["data"] -= self._prepared
        seconds["training"] += self._prepared
        return {part: value for part, value in seconds.items() if value}

    @property
    def spent(self) -> tuple[float, float, float]:
        """Seconds since the start: of preparing batches, of this thread's processor in training,
        and of both phases in all."""
        data, training = (marks.PHASES_AT + 4 * phase for phase in (DATA, TRAINING))
        seconds = self._words[data + marks.TOTAL]
        in_training = self._words[training + marks.PROCESSOR]
        return seconds, in_training, seconds + self._words[training + marks.TOTAL]
