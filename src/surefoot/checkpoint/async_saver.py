"""Checkpoints of any loop, saved in the background: the loop waits for one copy in memory.

One save is in flight at a time, and what goes wrong in it is raised at the next call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from ..errors import CheckpointError
from . import retention
from .arena import is_available
from .background import Background
from .commit import committed, step_of
from .folder import open_checkpoint
from .index import Kind
from .job import Job, Saved
from .retention import Rule
from .save import Live, prepare
from .states import Stateful
from .write import write

logger = logging.getLogger(__name__)


class AsyncSaver:
    """Saves to ``root/checkpoint-{step}``, and deletes what need not stay.

    A context: at its end, whatever has ended it, the save in flight is waited for. ``newest`` is
    the newest committed checkpoint, ``in_flight`` the one that is being written.

    Args:
        root: the folder of the run.
        keep: how many of the newest checkpoints stay, or a ``Rule``; all of them by default.
        resumed_from: the checkpoint that the run goes on from. It is never deleted, and files that
            are equal in it are linked instead of written again.
        share: whether files that are equal in the checkpoint before are linked.
        in_background: whether saves go on while the loop does, where the system can do that.
        max_shard_size: bytes of a file of weights, beyond which another one is begun.
        greater_is_better: of the metric by which a ``Rule`` keeps the best.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        keep: int | Rule | None = None,
        resumed_from: Path | str | None = None,
        share: bool = True,
        in_background: bool = True,
        max_shard_size: int = 5_000_000_000,
        greater_is_better: bool = False,
    ) -> None:
        self.root = Path(root)
        self.rule = keep if isinstance(keep, Rule) else Rule(keep=keep)
        self.resumed_from = Path(resumed_from) if resumed_from is not None else None
        self.newest = self.resumed_from
        self.in_flight: Path | None = None
        self._share = share
        self._in_background = in_background
        self._max_shard_size = max_shard_size
        self._greater = greater_is_better
        self._background = Background()
        self._done: list[Path] = []  # committed, and not yet told
        self._created: dict[int, float | None] = {}  # seconds since 1970, by step

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            logger.error("%s", failure)  # what ended the loop matters more

    def close(self) -> None:
        """Wait for the save in flight and end the process that writes. Raises as ``poll``."""
        try:
            self._finish()
        finally:
            self._background.close()

    def save(
        self,
        step: int,
        states: Mapping[str, Stateful],
        *,
        kind: Kind = "full",
        companions: Mapping[str, bytes] | None = None,
        metrics: Mapping[int, float] | None = None,
        protected: Collection[int] = (),
    ) -> None:
        """Take a snapshot of ``states`` and begin to write it; they may change from then on.

        A save in flight is waited for first.

        Args:
            step: the number of the checkpoint.
            states: as for ``checkpoint.save``, and so are ``kind`` and ``companions``.
            metrics: what a ``Rule`` that keeps the best goes by: the metric by step.
            protected: steps whose checkpoints stay, whatever the rule says.

        Raises:
            CheckpointError: the last save failed, and this one was not begun; or this one cannot
                be. No earlier checkpoint was touched.
        """
        self._finish()
        job, live = prepare(
            self.root,
            step,
            states,
            kind=kind,
            companions=companions,
            parent=self.newest.name if self.newest else None,
            max_shard_size=self._max_shard_size,
        )
        forget = self._old(metrics, protected, coming=step)
        self._start(replace(job, forget=forget, share=self._share), live)

    def poll(self) -> list[Path]:
        """The checkpoints committed since the last time anybody asked.

        Raises ``CheckpointError`` if the last save failed.
        """
        if self.in_flight:
            self._note(self._ask(wait=False))
        done, self._done = self._done, []
        return done

    def wait(self) -> list[Path]:
        """The same, once the save in flight has ended."""
        self._finish()
        return self.poll()

    def forget_old(
        self, metrics: Mapping[int, float] | None = None, protected: Collection[int] = ()
    ) -> None:
        """Delete now what the rule lets go; otherwise the next save does."""
        retention.drop_all([self.root / name for name in self._old(metrics, protected)])

    def _start(self, job: Job, live: Live) -> None:
        if self._in_background and not is_available():
            self._give_up("this system has no shared memory of the kind that is needed")
        if self._in_background:
            try:
                self._background.start(job, live)
                self.in_flight = job.target
                return
            except MemoryError as error:
                self._give_up(f"no room for a snapshot of the state ({error})")
        self._note(write(job, live))

    def _give_up(self, why: str) -> None:
        logger.warning("%s: training waits for every save", why)
        self._in_background = False

    def _finish(self) -> None:
        """Wait for the save in flight, if there is one."""
        if self.in_flight:
            self._note(self._ask(wait=True))

    def _ask(self, *, wait: bool) -> Saved | None:
        try:
            return self._background.wait() if wait else self._background.poll()
        except CheckpointError:
            self.in_flight = None
            raise

    def _note(self, saved: Saved | None) -> None:
        if saved is None:
            return
        self.in_flight, self.newest = None, saved.path
        self._done.append(saved.path)
        if saved.problem:
            logger.warning("%s", saved.problem)
        logger.debug(
            "%s: %d bytes, %d of them shared, in %.2f s",
            saved.path.name,
            saved.num_bytes,
            saved.num_shared,
            saved.seconds,
        )

    def _old(
        self,
        metrics: Mapping[int, float] | None,
        protected: Collection[int],
        coming: int | None = None,
    ) -> list[str]:
        """The names of the checkpoints to delete, once that of step ``coming`` is committed."""
        saved = {step_of(path): self._when(path) for path in committed(self.root)}
        now = time.time()
        if coming is not None:
            saved[coming] = self._created[coming] = now
        newest = self.newest if coming is None else None  # the coming one takes its place
        kept = {step_of(path) for path in (self.resumed_from, newest) if path}
        verdicts = retention.choose(
            saved,
            self.rule,
            now=now,
            metrics=metrics,
            greater=self._greater,
            protected=kept | set(protected),
        )
        return [f"checkpoint-{verdict.step}" for verdict in verdicts if not verdict.stays]

    def _when(self, path: Path) -> float | None:
        """When a checkpoint was saved, in seconds since 1970; None where nobody asks or knows."""
        if self.rule.keep_hours is None:
            return None
        step = step_of(path)
        if step not in self._created:
            try:
                created = open_checkpoint(path).manifest.created
                self._created[step] = retention.seconds(created)
            except CheckpointError:
                self._created[step] = None
        return self._created[step]
