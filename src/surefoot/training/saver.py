"""Checkpoints of the training loop: when a save is skipped, and which companions are stored.

Writing, committing and deleting is done by the ``AsyncSaver`` that other loops use as well.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

from ..checkpoint.background.saver import AsyncSaver, SaveListener
from ..checkpoint.background.snapshot_buffer import lacks_room
from ..checkpoint.disk import retention
from ..checkpoint.disk.commit import step_of
from ..checkpoint.disk.trainer_state import finite
from ..checkpoint.saving.writer_group import WriterGroup
from ..checkpoint.section import CheckpointSection
from ..checkpoint.state.protocols import Stateful
from ..parallel.world import ALONE, World
from ..storage.files import exists
from .state import TrainerState

logger = logging.getLogger(__name__)
Companions = Mapping[str, bytes]


@dataclass
class Saver:
    """Saves a run's states under ``output_dir`` as its recipe's ``checkpoint`` section says. A
    context manager: at the end of the block, however it ended, it waits for the save in flight."""

    output_dir: Path
    section: CheckpointSection
    kind: Literal["full", "adapter"]
    companions: Companions  # files that lie beside the weights in every checkpoint
    steps: Mapping[str, int | None]  # log_steps, eval_steps, save_steps, for trainer_state.json
    metric: str = "eval_loss"  # by which the best are kept
    greater: bool = False  # whether more of it is better
    resumed_from: Path | None = None
    is_foreign: bool = False  # whether another trainer wrote `resumed_from`
    world: World = ALONE
    listeners: Sequence[SaveListener] = ()  # on rank 0 only
    beside: Sequence[str] = ()  # of the run, to flush before a checkpoint is committed
    blocking_seconds: float = field(init=False, default=0.0)  # how long the loop waited for saves
    num_left_out: int = field(init=False, default=0)  # saves left out because one was in flight
    checkpoints: AsyncSaver = field(init=False)

    def __post_init__(self) -> None:
        section, world = self.section, self.world
        self.checkpoints = AsyncSaver(
            self.output_dir,
            keep=section.rule(),
            resumed_from=self.resumed_from,
            is_foreign=self.is_foreign,
            share=section.share_unchanged,
            in_background=section.async_save,
            max_shard_size=section.max_shard_size,
            greater_is_better=self.greater,
            on_error=section.on_save_error,
            has_lock=True,  # the run has locked its folder from the start
            writers=WriterGroup(
                section.layout or "full",
                world.rank,
                world.size,
                world.axes,
                world.gathered,
                world.from_main,
            ),
            listeners=self.listeners,
            beside=self.beside,
        )

    @property
    def newest(self) -> Path | None:
        """The latest committed checkpoint; on ranks other than 0 as of the last ``wait``."""
        return self.checkpoints.newest

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.checkpoints.__exit__(kind, error, traceback)

    def save(self, state: TrainerState, states: Mapping[str, Stateful], *, insist: bool) -> None:
        """Save step ``state.global_step``: it is committed once ``collect`` returns it. If a save
        is still in flight, the recipe decides whether to wait or to skip this one; with ``insist``
        it is never skipped. Raises ``CheckpointError`` if this save or the last one failed, and the
        recipe says to stop then; no earlier checkpoint was touched."""
        began = time.monotonic()
        is_spared = self.world.is_main and self._is_spared(state.global_step, insist)
        if self.world.from_main(is_spared):  # all do what it does
            return
        try:
            self.checkpoints.update(wait=True)  # whether a best step was saved is known then
            self.checkpoints.save(
                state.global_step,
                states,
                kind=self.kind,
                companions={**self.companions, "trainer_state.json": self._for_people(state)},
                metrics=self._metrics(state),
                protected=_best(state),
            )
        finally:
            self.blocking_seconds += time.monotonic() - began

    def check_room(self, num_bytes: int) -> None:
        """Log before the first save if a snapshot of so many bytes will not fit in memory; saves
        then write the state directly, and training waits for them."""
        if self.section.async_save and (why := lacks_room(num_bytes)):
            logger.warning(
                "a snapshot of the state will not fit in main memory (%s): training will wait for "
                "every save; free some memory, or set checkpoint.async_save: false",
                why,
            )

    def collect(self, *, wait: bool = False) -> list[int]:
        """The steps committed since the last call. Raises as ``save``."""
        if not wait:
            return [step_of(path) for path in self.checkpoints.poll()]
        began = time.monotonic()
        committed = self.checkpoints.wait()
        self.blocking_seconds += time.monotonic() - began
        return [step_of(path) for path in committed]

    def delete_old(self, state: TrainerState) -> None:
        """Apply the retention policy, which keeps the latest, the best, and the one resumed."""
        if self.world.is_main:
            self.checkpoints.delete_old(self._metrics(state), _best(state))

    def finish_uploads(self, state: TrainerState) -> None:
        """Wait at the end of a run until its listeners have finished; see ``AsyncSaver.finish``."""
        self.checkpoints.finish(self._metrics(state), _best(state))

    def path_of(self, step: int) -> Path:
        """The folder of the checkpoint of ``step``."""
        return self.checkpoints.path_of(step)

    def _is_spared(self, step: int, insist: bool) -> bool:
        """Whether the state of ``step`` is already saved, or is skipped for one in flight."""
        target, checkpoints = self.path_of(step), self.checkpoints
        if target in (checkpoints.newest, checkpoints.in_flight):
            return True
        if checkpoints.in_flight is None or self.section.on_save_busy != "skip" or insist:
            return False
        checkpoints.update()
        if (writing := checkpoints.in_flight) is None:
            return False
        self.num_left_out += 1
        logger.warning(
            "save of %s skipped (%d so far): %s is still being written; save less often, or "
            "set checkpoint.on_save_busy: wait",
            target.name,
            self.num_left_out,
            writing.name,
        )
        return True

    def _metrics(self, state: TrainerState) -> Mapping[int, float]:
        return retention.metrics_in(state.log_history, self.metric)

    def _for_people(self, state: TrainerState) -> bytes:
        step = state.best_global_step
        best = None if step is None else self.path_of(step)
        is_coming = step == state.global_step  # not each step is saved
        is_there = best is not None and (is_coming or exists(best))
        content = state.for_people(self.steps, str(best) if is_there else None)
        return (json.dumps(finite(content), indent=2, sort_keys=True) + "\n").encode()


def _best(state: TrainerState) -> tuple[int, ...]:
    """The best step, if there is one: its checkpoint is never deleted."""
    return () if state.best_global_step is None else (state.best_global_step,)
