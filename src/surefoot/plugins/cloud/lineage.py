"""Which checkpoints of a run in a store count, whichever launches have stored some.

A run may be launched on one machine while another one still uploads: paused, or without a network.
No clock shows which of them lives. So each launch has a number and folders of its own, and says at
its start what it continues: it creates ``.launches/00002.json``, which only one can.

The latest launch that counts has a history: launch 1 up to step 40, launch 2 up to step 70, itself
from there on. The checkpoints of that history are those of the run; all others are void, whenever
they come. A launch counts if the checkpoint that it continues is still there, if it began from
nothing, or if it has stored a checkpoint. Otherwise a late deletion by an older launch could leave
a run without any.

The run's other files (recipe, metrics, plots), which a launch writes again and again, have a place
of their own for each launch, too: ``launch-2/metrics.jsonl``; those of the first are at the top.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...checkpoint.disk.strict_json import dump, parse_object
from ...errors import CheckpointError

LAUNCHES = ".launches"
_CLAIM = re.compile(rf"{re.escape(LAUNCHES)}/(\d{{5,9}})\.json")
_STORED = re.compile(r"checkpoint-(0|[1-9]\d{0,17})(?:\.launch-([1-9]\d{0,8}))?")
MAX_CLAIM = 1 << 20  # bytes
OTHERS = (".", "checkpoint-", "launch-")  # how names at the top begin that are no files of the run
FIRST = 1  # its checkpoints have no number in their name, as those of earlier versions
Stored = tuple[int, int]  # the step of a checkpoint in a store, and the number of its launch


def name_of(stored: Stored) -> str:
    """The folder of a checkpoint in the store of its run."""
    step, launch = stored
    return f"checkpoint-{step}" if launch == FIRST else f"checkpoint-{step}.launch-{launch}"


def stored_of(name: str) -> Stored | None:
    """Step and launch of a folder in the store of a run; None: it is no checkpoint's."""
    match = _STORED.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2] or FIRST))


def local_name(name: str) -> str:
    """What the checkpoint in a folder in a store is called here, ``checkpoint-N``."""
    stored = stored_of(name)
    return name if stored is None else f"checkpoint-{stored[0]}"


def claim_of(name: str) -> int | None:
    """The number of the launch whose claim a file is; None: it is none."""
    match = _CLAIM.fullmatch(name)
    return None if match is None else int(match[1])


@dataclass(frozen=True)
class StoredLaunch:
    """One launch of a run, and what it continues."""

    number: int
    history: tuple[Stored, ...] = ()  # the last step of each launch before it, in order
    host: str = ""
    process: int = 0
    nonce: str = ""  # so that no two claims are equal

    @property
    def base(self) -> Stored | None:
        """The checkpoint that it continues; None: it began from nothing."""
        return self.history[-1] if self.history else None

    @property
    def file(self) -> str:
        """Its claim."""
        return f"{LAUNCHES}/{self.number:05d}.json"

    @property
    def stop(self) -> str:
        """What whoever wants it to stop creates."""
        return f"{LAUNCHES}/{self.number:05d}.stop"

    @property
    def place(self) -> str:
        """What the names of the run's files that it writes begin with."""
        return "" if self.number == FIRST else f"launch-{self.number}/"

    def has(self, stored: Stored) -> bool:
        """Whether a checkpoint is one of its history, or its own."""
        step, launch = stored
        begin = -1
        for last, number in self.history:
            if number == launch:
                return begin < step <= last
            begin = last
        return launch == self.number and step > begin

    def dump(self) -> bytes:
        """The content of its claim."""
        fields = {
            "history": [list(each) for each in self.history],
            "host": self.host,
            "process": self.process,
            "nonce": self.nonce,
        }
        return dump(fields)

    @classmethod
    def parse(cls, number: int, data: bytes) -> StoredLaunch:
        """The launch of a claim. Raises ``CheckpointError``."""
        where = f"{LAUNCHES}/{number:05d}.json"
        fields = parse_object(data, where)
        history = fields.get("history")
        if not isinstance(history, list) or not all(_is_stored(each) for each in history):
            raise CheckpointError(f"{where}: history: expected pairs of a step and a launch")
        pairs = tuple((step, launch) for step, launch in history)
        host, process, nonce = (fields.get(name) for name in ("host", "process", "nonce"))
        return cls(
            number,
            pairs,
            host if isinstance(host, str) else "",
            process if isinstance(process, int) else 0,
            nonce if isinstance(nonce, str) else "",
        )


def _is_stored(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and all(type(each) is int and each >= 0 for each in value)


@dataclass(frozen=True)
class Lineage:
    """The launches of a run, and the checkpoints that are committed in its store."""

    launches: Mapping[int, StoredLaunch]
    committed: Collection[Stored]

    @cached_property
    def latest(self) -> StoredLaunch | None:
        """The latest launch that counts; None: no launch has made a claim."""
        have_committed = {launch for _, launch in self.committed}
        for number in sorted(self.launches, reverse=True):
            launch = self.launches[number]
            if launch.base is None or launch.base in self.committed or number in have_committed:
                return launch
        return None

    @cached_property
    def valid(self) -> dict[int, Stored]:
        """The checkpoints of the run, by step, oldest first."""
        latest = self.latest or StoredLaunch(FIRST)  # of an earlier version, without claims
        return {stored[0]: stored for stored in sorted(self.committed) if latest.has(stored)}

    def next_launch(self, base: int | None) -> StoredLaunch:
        """The launch that continues the checkpoint of the step ``base``; None: nothing."""
        number = max([*self.launches, *(launch for _, launch in self.committed)], default=0) + 1
        if base is None:
            return StoredLaunch(number)
        stored, latest = self.valid[base], self.latest or StoredLaunch(FIRST)
        before = [each for each in latest.history if each[0] < base and each[1] != stored[1]]
        return StoredLaunch(number, (*before, stored))


def claims(names: Iterable[str]) -> dict[int, str]:
    """The files of claims, by the number of their launch."""
    return {number: name for name in names if (number := claim_of(name)) is not None}
