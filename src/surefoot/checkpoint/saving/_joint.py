"""How the ranks of a joint save communicate: by a ``Meeting``, whose one implementation is the
shared folder.

A process group would die with the ranks that train, and a save must not (docs/decisions/0021). A
report, ``.rank_00003.json`` in the temporary folder, is locked by its writer until it is complete.
So rank 0 can distinguish a rank that still writes from one that died, whatever machine it ran on;
the others watch rank 0 by the lock of the manifest. If any rank fails or dies, the attempt has
failed for all, and each of them makes another one, in another folder.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ...errors import CheckpointError
from ...storage import files
from ..disk.commit import part_of
from ..disk.manifest import MANIFEST

_REPORT = ".rank_{:05d}.json"
_CHANGED = ".rank_{:05d}.changed.json"
_BEGIN = ".begin.json"
_PAUSE = 0.02  # seconds between two looks
_PATIENCE = 120.0  # seconds for another process to begin; much less than collectives wait
_LAST_CHANCE = 5.0  # the same, when those that train are dead
_MAX_REPORT = 1 << 30
Report = Mapping[str, Any]
T = TypeVar("T")


class Meeting(Protocol):
    """One attempt of all ranks to save together. What waits raises ``CheckpointError`` if a rank
    that it waits for failed, died, or never came."""

    def announce(self) -> None:
        """Called by rank 0, once the destination exists and is its own: the others may join."""

    def join(self) -> bool:
        """Called by the others; False if this attempt is over, or another one has begun."""

    def propose(self, changed: Sequence[str]) -> None:
        """Called by the others: which shared files differ from the parent's."""

    def proposed(self) -> set[str]:
        """What the others have proposed. Called by rank 0."""

    def begin(self, names: Sequence[str]) -> None:
        """Called by rank 0: these files exist, and all ranks write their parts of them."""

    def begun(self) -> list[str]:
        """These files, for the others."""

    def report(self, work: Callable[[], Report]) -> None:
        """Called by the others: do ``work``, alive for rank 0 meanwhile, and send its report."""

    def reports(self) -> Iterator[Report]:
        """The reports of all others, in the order of ranks. Called by rank 0."""

    def ended(self) -> bool:
        """Wait, as one of the others, until rank 0 has committed (True), failed or died."""


@dataclass(frozen=True)
class SharedFolder:
    """A meeting by files and their locks in the temporary folder, which all ranks see."""

    target: Path
    nonces: Sequence[str]  # of this attempt's folder, those before, and the next
    attempt: int
    rank: int
    world_size: int
    is_orphan: Callable[[], bool]  # whether those that train are dead, so that no other will begin

    @property
    def folder(self) -> Path:
        """The temporary folder of this attempt."""
        return self._folder_of(self.attempt)

    def announce(self) -> None:
        """An empty report of rank 0: the folder exists, and is locked."""
        files.create(self.folder / _REPORT.format(0)).close()

    def join(self) -> bool:
        """Wait for the folder; raises if it is not visible here."""
        began = time.monotonic()
        while not files.exists(self.folder / _REPORT.format(0)):
            if self._is_committed() or files.exists(self._folder_of(self.attempt + 1)):
                return False
            for attempt in range(self.attempt):
                self._give_up(self._folder_of(attempt))
            if time.monotonic() - began > self._patience():
                raise CheckpointError(
                    f"cannot save {self.target}: temporary folder {self.folder.name} is not "
                    "visible on this rank; all machines must share train.output_dir (or "
                    "train.cache_dir)"
                )
            time.sleep(_PAUSE)
        return True

    def propose(self, changed: Sequence[str]) -> None:
        """By a small file."""
        _put(self.folder / _CHANGED.format(self.rank), changed)

    def proposed(self) -> set[str]:
        """From the files of all others."""
        changed: set[str] = set()
        for rank in range(1, self.world_size):
            path = self.folder / _CHANGED.format(rank)

            def look(path: Path = path, rank: int = rank) -> list[str] | None:
                if files.exists(path):
                    return _get(path)
                self._refuse_error(rank, _look(self.folder / _REPORT.format(rank), rank) or {})
                return None

            changed |= set(self._wait_for(look, rank))
            files.remove_tree(path)
        return changed

    def begin(self, names: Sequence[str]) -> None:
        """Only now: the others open these files, which exist at full length."""
        _put(self.folder / _BEGIN, names)

    def begun(self) -> list[str]:
        """From the file of rank 0."""
        while not files.exists(self.folder / _BEGIN):
            if self._is_abandoned():
                raise CheckpointError(
                    "rank 0 died or aborted before it created the checkpoint files"
                )
            time.sleep(_PAUSE)
        return _get(self.folder / _BEGIN)

    def report(self, work: Callable[[], Report]) -> None:
        """Into a file that appears locked, and stays so until it is complete."""
        path = self.folder / _REPORT.format(self.rank)
        # the attempt may have failed meanwhile, and its folder is being removed
        with contextlib.suppress(FileNotFoundError), files.create(path.with_suffix(".part")) as f:
            f.lock()
            files.rename(f.path, path)
            data = json.dumps(work()).encode()
            f.reserve(len(data))
            f.write_at(0, data)
            f.sync()

    def reports(self) -> Iterator[Report]:
        """As the files appear; what the meeting needed is removed behind the last one."""
        for rank in range(1, self.world_size):
            path = self.folder / _REPORT.format(rank)
            report = self._wait_for(partial(_look, path, rank), rank)
            self._refuse_error(rank, report)
            yield report
            files.remove_tree(path)
        for name in (_BEGIN, _REPORT.format(0)):
            files.remove_tree(self.folder / name)

    def ended(self) -> bool:
        """By the lock of the manifest, and the folder of the checkpoint."""
        while not (is_committed := self._is_committed()) and not self._is_abandoned():
            time.sleep(_PAUSE)
        return is_committed or self._is_committed()

    def _is_committed(self) -> bool:
        return files.exists(self.target / MANIFEST)

    def _is_abandoned(self) -> bool:
        """Whether the manifest of the temporary folder is no longer locked."""
        try:
            with files.open_file(self.folder / MANIFEST, follow=False, write=True) as manifest:
                return manifest.lock()
        except BlockingIOError:
            return False
        except FileNotFoundError:
            return True

    def _folder_of(self, attempt: int) -> Path:
        return part_of(self.target, self.nonces[attempt])

    def _give_up(self, folder: Path) -> None:
        """Leave an empty report, as of a rank that died, in an attempt that has none."""
        if files.exists(folder / _REPORT.format(0)):
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                files.create(folder / _REPORT.format(self.rank)).close()

    def _patience(self) -> float:
        """Seconds to wait; if the training ranks are dead, none will start any more."""
        return _LAST_CHANCE if self.is_orphan() else _PATIENCE

    def _wait_for(self, look: Callable[[], T | None], rank: int) -> T:
        """The result of ``look`` once there is one; raises if the rank never starts."""
        began = time.monotonic()
        while True:
            try:
                result = look()
            except FileNotFoundError:
                if time.monotonic() - began > self._patience():
                    raise CheckpointError(f"rank {rank} did not start to save") from None
                result = None
            if result is not None:
                return result
            time.sleep(_PAUSE)

    def _refuse_error(self, rank: int, report: Report) -> None:
        if "error" in report:
            raise CheckpointError(f"cannot save {self.target}: rank {rank}: {report['error']}")


def _put(path: Path, names: Sequence[str]) -> None:
    """A small file that is complete when it appears."""
    part = path.with_suffix(".part")
    with files.create(part) as file:
        file.write_at(0, json.dumps([*names]).encode())
    files.rename(part, path)


def _get(path: Path) -> list[str]:
    with files.open_file(path, follow=False) as file:
        names: list[str] = json.loads(files.read_all(file, _MAX_REPORT))
    return names


def _look(path: Path, rank: int) -> Report | None:
    """The report of a rank; None while it is writing."""
    try:
        with files.open_file(path, follow=False, write=True) as file:
            is_over = file.lock()
            data = files.read_all(file, _MAX_REPORT)
    except BlockingIOError:
        return None
    try:
        report: Report = json.loads(data)
    except ValueError:  # empty, or zeros: space that was reserved
        if not is_over:  # there are no locks here, and patience decides
            raise FileNotFoundError(path) from None
        raise CheckpointError(f"rank {rank} died during the save") from None
    return report
