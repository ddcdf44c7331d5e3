"""Asynchronous saves of any training loop: the loop waits for one copy in memory.

At most one save is in flight, and its errors are raised at the next call. Listeners follow the
saves, so that neither this module nor a loop knows of object stores. Where the system supports no
asynchronous save, the loop waits for each.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from ...errors import CheckpointError
from ...log import fell_back
from ...storage import files
from ...storage.folder_lock import FolderIdentity, FolderLock, lock
from ..apart import Apart
from ..disk import retention
from ..disk.commit import committed, step_of
from ..disk.manifest import MANIFEST, Kind
from ..disk.retention import RetentionPolicy, Times, pinned
from ..state.roles import Stateful
from ._snapshot_buffer import lacks_room
from ._writer_process import Background
from ._writing import Saved
from .listeners import SaveListener
from .preparation import ALONE, WriterGroup, prepare

logger = logging.getLogger(__name__)


def _opened(root: Path) -> FolderIdentity | None:
    with files.raising(CheckpointError, f"cannot save to {root}"):
        return FolderIdentity(root) if files.exists(root) else None


@dataclass(eq=False)
class AsyncSaver:
    """Saves to ``root/checkpoint-{step}``, and deletes checkpoints by the retention policy.

    A context manager: at the end of the block, however it ended, it waits for the save in flight.
    ``newest`` is the latest committed checkpoint, ``in_flight`` the one that is being written. Each
    rank of ``writers`` has a saver, and all must call ``save``, ``wait`` and ``close``.

    Raises ``CheckpointError`` if another process saves there.
    """

    root: Path | str
    """The folder of the run."""
    _: KW_ONLY
    keep: int | RetentionPolicy | None = None
    """How many of the latest checkpoints to keep, or a ``RetentionPolicy``; by default all."""
    resumed_from: Path | str | None = None
    """The checkpoint that the run resumes from. It is never deleted, and files that are equal in it
    are linked instead of written again."""
    is_foreign: bool = False
    """Whether another trainer wrote ``resumed_from``: then it does not count as ``newest``."""
    share: bool = True
    """Whether files that are equal in the previous checkpoint are linked. Every so often they are
    written again: among the checkpoints that ``keep`` keeps, two have files of their own."""
    in_background: bool = True
    """Whether saves continue while the loop does, where the system can do that."""
    max_shard_size: int = 5_000_000_000
    """Largest weight file in bytes."""
    greater_is_better: bool = False
    """Of the metric by which a ``RetentionPolicy`` keeps the best."""
    on_error: Literal["stop", "continue"] = "stop"
    """Whether a save that failed raises, or is logged only."""
    has_lock: bool = False
    """Whether the caller has locked ``root`` already."""
    writers: WriterGroup = ALONE
    """The ranks that save together, and the layout of their checkpoints."""
    listeners: Sequence[SaveListener] = ()
    """What follows the saves; on rank 0 only."""
    beside: Sequence[str] = ()
    """Files in ``root``, such as a log, that are flushed to the disk before each commit."""
    kind: Kind = "full"
    """What the weights are of, and ``companions``, files beside the weights of every checkpoint: as
    for ``checkpoint.save``."""
    companions: Mapping[str, bytes] = field(default_factory=dict)
    on_busy: Literal["wait", "skip"] = "wait"
    """Whether a save waits for one in flight, or is skipped."""
    apart: Apart | None = None
    """The store in which the ranks save, if they have no folder in common. ``root`` is then a name
    only: a save is committed once it is there."""
    newest: Path | None = field(init=False, default=None)
    blocking_seconds: float = field(init=False, default=0.0)  # for which the loop has waited
    num_committed: int = field(init=False, default=0)
    save_seconds: float = field(init=False, default=0.0)  # of the latest, until it was committed
    num_skipped: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._root = Path(self.root)
        self._rule = (
            self.keep if isinstance(self.keep, RetentionPolicy) else RetentionPolicy(keep=self.keep)
        )
        self._resumed_from = None if self.resumed_from is None else Path(self.resumed_from)
        self.newest = None if self.is_foreign else self._resumed_from
        self._flight = Background(is_off=not self.in_background)
        self._num_shared = 0 if self._resumed_from is None else 1  # saves that shared, in a row
        self._lock: FolderLock | None = None
        if not (self.has_lock or self.writers.rank):
            self._lock = lock(
                self._root,
                CheckpointError,
                doing=f"cannot save to {self._root}",
                taken=f"{self._root}: another process is saving here, or a run is training here; "
                "stop it or choose another folder",
            )
        self._folder = None if self.writers.rank else _opened(self._root)
        self._times = Times(self._root)
        self._part = self._root if self.apart is None else self.apart.part_of(self.writers.rank)
        self._done: list[Path] = []  # committed, and not yet returned to the caller
        self._gone: set[str] = set()  # names of which a line has said that they are deleted

    @property
    def in_flight(self) -> Path | None:
        """The checkpoint that is being written."""
        target = self._flight.target
        return None if target is None else self.path_of(step_of(target))

    def path_of(self, step: int) -> Path:
        """The folder of the checkpoint of ``step``."""
        return self._root / f"checkpoint-{step}"

    def has(self, step: int) -> bool:
        """Whether a checkpoint of ``step`` is committed, here or where a listener keeps it."""
        is_here = files.exists(self.path_of(step) / MANIFEST)
        return is_here or any(step in listener.steps for listener in self.listeners)

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None and self.writers.size > 1:
            return  # another rank's part may never come; left alone, the writer ends by itself
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            logger.error("%s", failure)

    def close(self) -> None:
        """Wait for the save in flight and end the writer process. Raises as ``poll``."""
        try:
            self.update(wait=True)
        finally:
            self._flight.close()
            if self._lock is not None:
                self._lock.file.close()
            self._lock = None
            if self._folder is not None:
                self._folder.close()

    def check_room(self, num_bytes: int) -> None:
        """Log before the first save if a snapshot of so many bytes will not fit in memory; saves
        then write the state directly, and the loop waits for them."""
        if self.in_background and (why := lacks_room(num_bytes)):
            what = "a snapshot of the state will not fit in main memory"
            cost = "will make training wait for every save; free some memory, or set "
            fell_back(what, why, cost + "checkpoint.async_save: false")

    def save(
        self,
        step: int,
        states: Mapping[str, Stateful],
        *,
        kind: Kind | None = None,
        companions: Mapping[str, bytes] | None = None,
        metrics: Mapping[int, float] | None = None,
        protected: Collection[int] = (),
        insist: bool = True,
    ) -> None:
        """Take a snapshot of ``states`` and begin to write it; they may change from then on. It is
        committed once ``poll`` returns it.

        A save in flight is waited for first. Nothing is done for a step that is saved already.

        Args:
            step: the number of the checkpoint.
            states: as for ``checkpoint.save``.
            kind: of these weights, if it is not the saver's.
            companions: files beside those of the saver.
            metrics: the metric by step, for a ``RetentionPolicy`` that keeps the best.
            protected: steps whose checkpoints are kept, whatever the policy says.
            insist: never skip this one, whatever ``on_busy`` says.

        Raises:
            CheckpointError: the last save failed, and this one was not begun; or this one cannot
                be. No earlier checkpoint was touched.
        """
        began = time.monotonic()
        is_spared = not self.writers.rank and self._is_spared(self.path_of(step), insist)
        if self.writers.from_first(is_spared):  # all ranks do what the first does
            return
        try:
            self.update(wait=True)  # whether a best step was saved is known then
            parent = self.newest or self._resumed_from
            try:
                # What rank 0 alone can find out comes first, and all do what it does: those that
                # began a save without it would wait for it, or for what it exchanges next.
                before = self.writers.from_first(self._before(step, metrics, protected))
                replaces, problem = before
                if problem is not None:
                    raise CheckpointError(problem)
                job, live = prepare(
                    self._part,
                    step,
                    states,
                    kind=kind or self.kind,
                    companions={**self.companions, **(companions or {})},
                    parent=parent.name if parent else None,
                    max_shard_size=self.max_shard_size,
                    writers=self.writers,
                )
            except CheckpointError as error:
                self._bear(error)
                return
            # A clone of a file has one name only, so saves that share in a row are counted as well.
            share = self.share and self._num_shared < self._rule.most_sharing
            self._num_shared = self._num_shared + 1 if share else 1
            job = replace(
                job,
                forget=[] if self.writers.rank and self.apart is None else replaces,
                beside=self.beside,
                share=share,
                most_sharing=self._rule.most_sharing,
                makes_root=False,
                apart=self.apart,
            )
            for listener in self.listeners:
                listener.on_save(replaces)
            self._note(partial(self._flight.save, job, live))
        finally:
            self.blocking_seconds += time.monotonic() - began

    def _is_spared(self, target: Path, insist: bool) -> bool:
        """Whether that state is saved already, or is skipped for one in flight."""
        if target in (self.newest, self.in_flight):
            return True
        if self.in_flight is None or self.on_busy != "skip" or insist:
            return False
        self.update()
        if (writing := self.in_flight) is None:
            return False
        self.num_skipped += 1
        logger.warning(
            "save of %s skipped (%d so far): %s is still being written; save less often, or "
            "set checkpoint.on_save_busy: wait",
            target.name,
            self.num_skipped,
            writing.name,
        )
        return True

    def update(self, *, wait: bool = False) -> None:
        """Bring ``newest`` and ``in_flight`` up to date; raises if the last save failed."""
        self._note(self._flight.wait if wait else self._flight.poll)

    def poll(self) -> list[Path]:
        """The checkpoints committed since the last call; raises if the last save failed."""
        self.update()
        for listener in self.listeners:
            listener.on_poll()
        done, self._done = self._done, []
        return done

    def wait(self) -> list[Path]:
        """The same, once the save in flight has ended."""
        began = time.monotonic()
        self.update(wait=True)
        newest = self.newest  # the others know of their part only, and may have another root
        if newest is not None and newest.parent == self._root:
            newest = Path(newest.name)
        newest = self.writers.from_first(newest)
        self.newest = None if newest is None else self._root / newest
        self.blocking_seconds += time.monotonic() - began
        return self.poll()

    def delete_old(
        self, metrics: Mapping[int, float] | None = None, protected: Collection[int] = ()
    ) -> None:
        """Delete now what the retention policy does not keep; otherwise the next save does. The
        first rank deletes for all."""
        if self.writers.rank:
            return
        old = self._old(metrics, protected)
        here = {path.name for path in committed(self._root)}
        deleted = [name for name in old if name in here]
        retention.drop_all([self._root / name for name in deleted])
        self._log_deleted(deleted)
        for listener in self.listeners:
            listener.on_deleted(old)

    def finish(
        self, metrics: Mapping[int, float] | None = None, protected: Collection[int] = ()
    ) -> None:
        """Wait for the listeners, and delete what they have protected; raises if one failed."""
        for listener in self.listeners:
            listener.finish()
        if self.listeners:
            self.delete_old(metrics, protected)

    def _before(
        self, step: int, metrics: Mapping[int, float] | None, protected: Collection[int]
    ) -> tuple[list[str], str | None]:
        """The checkpoints that one of ``step`` replaces; and why it cannot be saved, if rank 0
        finds a reason."""
        if self.writers.rank:
            return [], None
        try:
            self._expect_folder()
            return self._old(metrics, protected, coming=step), None
        except CheckpointError as error:
            return [], str(error)

    def _expect_folder(self) -> None:
        """Raise ``CheckpointError`` if ``root`` is no longer the folder that it was at the start:
        to make it again would divide the run between two folders. Only a first save makes it."""
        if self._folder is None:
            with files.raising(CheckpointError, f"cannot save to {self._root}"):
                files.make_folder(self._root)
            self._folder = _opened(self._root)
        if self._folder is None or self._folder.is_there():
            return
        there = self._folder.current_path()
        what = "removed, with the checkpoints in it" if there is None else f"renamed to {there}"
        cure = "start" if there is None else "Give it its name back, and start"
        raise CheckpointError(
            f"{self._root}: this folder was {what} while the run was saving to it, so nothing more "
            f"is saved. {cure.capitalize()} the same command again"
        )

    def _note(self, ask: Callable[[], Saved | None]) -> None:
        """Call ``ask`` for the outcome of a save, and store it."""
        try:
            saved = ask()
        except CheckpointError as error:
            self._bear(error)
            return
        if saved is None:
            return
        if saved.problem:
            logger.warning("%s", saved.problem)
        figures = saved.path.name, saved.num_bytes, saved.num_shared, saved.seconds
        logger.debug("%s: %d bytes, %d of them shared, in %.2f s", *figures)
        if saved.is_committed:
            path = self.path_of(step_of(saved.path))
            self.newest = path
            self.num_committed, self.save_seconds = self.num_committed + 1, saved.seconds
            self._done.append(path)
            if not self.writers.rank:
                self._log_deleted(saved.replaced)
            for listener in self.listeners:
                listener.on_committed(path, saved.replaced)

    def _log_deleted(self, names: Sequence[str]) -> None:
        """One line for the checkpoints that are gone; on the first rank, which has their names.
        Those that a listener has yet to delete come again."""
        gone = [name for name in names if not files.exists(self._root / name)]
        if new := [name for name in gone if name not in self._gone]:
            logger.info("deleted %s (%s)", ", ".join(new), self._rule)
        self._gone = {*gone}

    def _bear(self, error: CheckpointError) -> None:
        """Raise or log the ``error`` of a save."""
        if self.on_error == "stop":
            raise error
        logger.warning("%s; training continues, latest checkpoint: %s", error, self.newest)

    def _old(
        self,
        metrics: Mapping[int, float] | None,
        protected: Collection[int],
        coming: int | None = None,
    ) -> list[str]:
        """The checkpoints to delete once ``coming`` is committed; rank 0 deletes for all."""
        if self.writers.rank:
            return []
        saved = self._times.of(self._rule, coming=coming)
        newest = self.newest if coming is None else None  # the coming one takes its place
        all_protected = {*protected, *pinned(self._root)}
        all_protected |= {step_of(path) for path in (self._resumed_from, newest) if path}
        for listener in self.listeners:
            saved = {step: self._times.known(step) for step in listener.steps} | saved
            all_protected |= set(listener.protected)
        verdicts = retention.decide(
            saved,
            self._rule,
            now=self._times.clock(),
            metrics=metrics,
            greater=self.greater_is_better,
            protected=all_protected,
        )
        return [self.path_of(verdict.step).name for verdict in verdicts if not verdict.stays]
