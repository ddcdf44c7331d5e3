"""Asynchronous checkpoints for any loop: the loop waits for one copy in memory.

At most one save is in flight, and its errors are raised by the next call.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from ...storage.lock import lock
from ..disk import retention
from ..disk.commit import step_of
from ..disk.manifest import Kind
from ..disk.retention import RetentionPolicy, Times
from ..saving.job import Saved
from ..saving.preparation import prepare
from ..state.states import Stateful
from .in_flight import InFlightSave, end

logger = logging.getLogger(__name__)


class AsyncSaver:
    """Saves to ``root/checkpoint-{step}``, and deletes checkpoints that the retention policy does
    not keep.

    A context manager: at the end of the block, however it ended, it waits for the save in flight.
    ``newest`` is the latest committed checkpoint, ``in_flight`` the one that is being written.

    Args:
        root: the folder of the run.
        keep: how many of the latest checkpoints to keep, or a ``RetentionPolicy``; all of them by
            default.
        resumed_from: the checkpoint from which the run has resumed. It is never deleted, and files
            that are equal to its files are linked instead of written again.
        share: whether files that are equal to those of the previous checkpoint are linked.
        in_background: whether saves are asynchronous, where the system supports that.
        max_shard_size: bytes of a file of weights, beyond which another one is started.
        greater_is_better: of the metric by which a ``RetentionPolicy`` keeps the best.

    Raises ``CheckpointError`` if another process saves there.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        keep: int | RetentionPolicy | None = None,
        resumed_from: Path | str | None = None,
        share: bool = True,
        in_background: bool = True,
        max_shard_size: int = 5_000_000_000,
        greater_is_better: bool = False,
    ) -> None:
        self.root = Path(root)
        self.rule = keep if isinstance(keep, RetentionPolicy) else RetentionPolicy(keep=keep)
        self.resumed_from = Path(resumed_from) if resumed_from is not None else None
        self.newest = self.resumed_from
        self._share = share
        self._in_background = in_background
        self._max_shard_size = max_shard_size
        self._greater = greater_is_better
        self._flight = InFlightSave()
        self._lock: int | None = lock(self.root)
        self._times = Times(self.root)
        self._done: list[Path] = []  # committed, and not yet told

    @property
    def in_flight(self) -> Path | None:
        """The checkpoint that is being written."""
        return self._flight.target

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end(self.close, error)

    def close(self) -> None:
        """Wait for the save in flight and end the writer process. Raises as ``poll``."""
        try:
            self._note(self._flight.wait())
        finally:
            self._flight.close()
            if self._lock is not None:
                os.close(self._lock)
            self._lock = None

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
        """Take a snapshot of ``states`` and start to write it; they may change from then on.

        Waits for a save in flight first.

        Args:
            step: the number of the checkpoint.
            states: as for ``checkpoint.save``, and so are ``kind`` and ``companions``.
            metrics: the metric by step, for a ``RetentionPolicy`` that keeps the best.
            protected: steps whose checkpoints are kept, whatever the policy.

        Raises:
            CheckpointError: the last save failed, and this one was not started; or this one cannot
                be started. No earlier checkpoint was touched.
        """
        self._note(self._flight.wait())
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
        job = replace(job, forget=forget, share=self._share)
        self._note(self._flight.start(job, live, in_background=self._in_background))

    def poll(self) -> list[Path]:
        """The checkpoints committed since the last call.

        Raises ``CheckpointError`` if the last save failed.
        """
        self._note(self._flight.poll())
        done, self._done = self._done, []
        return done

    def wait(self) -> list[Path]:
        """The same, once the save in flight has ended."""
        self._note(self._flight.wait())
        return self.poll()

    def forget_old(
        self, metrics: Mapping[int, float] | None = None, protected: Collection[int] = ()
    ) -> None:
        """Apply the retention policy now; otherwise the next save does."""
        retention.drop_all([self.root / name for name in self._old(metrics, protected)])

    def _note(self, saved: Saved | None) -> None:
        if saved is not None:
            self.newest = saved.path
            self._done.append(saved.path)

    def _old(
        self,
        metrics: Mapping[int, float] | None,
        protected: Collection[int],
        coming: int | None = None,
    ) -> list[str]:
        """The names of the checkpoints to delete, once that of step ``coming`` is committed."""
        saved = self._times.of(self.rule, coming=coming)
        newest = self.newest if coming is None else None  # the coming one takes its place
        kept = {step_of(path) for path in (self.resumed_from, newest) if path}
        verdicts = retention.decide(
            saved,
            self.rule,
            now=time.time(),
            metrics=metrics,
            greater=self._greater,
            protected=kept | set(protected),
        )
        return [f"checkpoint-{verdict.step}" for verdict in verdicts if not verdict.stays]
