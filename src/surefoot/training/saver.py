"""The loop's side of checkpoints: what goes into one, and what becomes of old ones.

A save stops the loop for a snapshot only; the rest happens in the background, and the loop asks at
every step what has become of it.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal

from ..checkpoint import retention
from ..checkpoint.arena import is_available
from ..checkpoint.background import Background
from ..checkpoint.commit import committed, step_of
from ..checkpoint.folder import open_checkpoint
from ..checkpoint.job import Job, Saved
from ..checkpoint.save import Live, prepare
from ..checkpoint.section import CheckpointSection
from ..checkpoint.states import Stateful
from ..checkpoint.write import write
from ..errors import CheckpointError
from ..remote.mirror import Mirror
from .state import TrainerState

logger = logging.getLogger(__name__)
Companions = Mapping[str, bytes]


@dataclass
class Saver:
    """Saves a run's states under ``output_dir`` as its recipe's ``checkpoint`` section says.

    A context: at its end, whatever has ended it, the save in flight is waited for.
    """

    output_dir: Path
    section: CheckpointSection
    kind: Literal["full", "adapter"]
    companions: Companions  # files that lie beside the weights in every checkpoint
    steps: Mapping[str, int | None]  # log_steps, eval_steps, save_steps, for trainer_state.json
    metric: str = "eval_loss"  # by which the best are kept
    greater: bool = False  # whether more of it is better
    resumed_from: Path | None = None
    newest: Path | None = None
    mirror: Mirror | None = None  # that keeps a copy of the run in a store
    seconds_stopped: float = 0.0  # how long saves have kept the loop waiting
    num_left_out: int = 0  # saves that were not taken because one was in flight
    _background: Background = field(default_factory=Background)
    _in_flight: Path | None = None
    _forgotten: Sequence[str] = ()  # names that the save in flight takes the place of
    _done: list[int] = field(default_factory=list)  # committed steps that nobody was told of
    _created: dict[int, float | None] = field(default_factory=dict)  # seconds since 1970, by step

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._finish()
        except CheckpointError as failure:
            if error is None:
                raise
            logger.error("%s", failure)  # what ended the loop matters more
        finally:
            self._background.close()

    def save(self, state: TrainerState, states: Mapping[str, Stateful], *, insist: bool) -> None:
        """Save step ``state.global_step``: it is committed once ``collect`` tells so.

        If a save is still in flight it is waited for, or this one is left out, as the recipe says;
        never if the loop must ``insist``.

        Raises:
            CheckpointError: this save or the last one failed, and the recipe says to stop then; no
                earlier checkpoint was touched.
        """
        target = self.path_of(state.global_step)
        if target in (self.newest, self._in_flight):
            return  # this very state lies there already
        began = time.monotonic()
        if self._in_flight and self.section.on_save_busy == "skip" and not insist:
            self._note(self._background.poll)
            if self._in_flight:
                self._leave_out(target)
                return
        try:
            self._finish()
            self._start(*self._prepare(state, states))
        except CheckpointError as error:
            self._bear(error)
        finally:
            self.seconds_stopped += time.monotonic() - began

    def collect(self, *, wait: bool = False) -> list[int]:
        """The steps committed since the last call. Raises as ``save``."""
        if wait:
            began = time.monotonic()
            self._finish()
            self.seconds_stopped += time.monotonic() - began
        elif self._in_flight:
            self._note(self._background.poll)
        if self.mirror is not None:
            self.mirror.poll()
        done, self._done = self._done, []
        return done

    def forget_old(self, state: TrainerState) -> None:
        """Delete what retention lets go: never the newest, the best, or the one resumed from."""
        old = self._old(state)
        here = {path.name for path in committed(self.output_dir)}
        retention.drop_all([self.output_dir / name for name in old if name in here])
        if self.mirror is not None:
            self.mirror.let_go(old)

    def settle(self, state: TrainerState) -> None:
        """At the end of a run: wait until its store has everything, then let go what had to wait.

        Raises ``CheckpointError`` if something could not be uploaded.
        """
        if self.mirror is not None:
            self.mirror.finish()
            self.forget_old(state)

    def path_of(self, step: int) -> Path:
        """The folder of the checkpoint of ``step``."""
        return self.output_dir / f"checkpoint-{step}"

    def _leave_out(self, target: Path) -> None:
        self.num_left_out += 1
        logger.warning(
            "%s is left out (%d so far): %s is still being written; save less often, or set "
            "checkpoint.on_save_busy: wait",
            target.name,
            self.num_left_out,
            self._in_flight.name if self._in_flight else "",
        )

    def _prepare(self, state: TrainerState, states: Mapping[str, Stateful]) -> tuple[Job, Live]:
        parent = self.newest or self.resumed_from
        job, live = prepare(
            self.output_dir,
            state.global_step,
            states,
            kind=self.kind,
            companions={**self.companions, "trainer_state.json": self._for_people(state)},
            parent=parent.name if parent else None,
            max_shard_size=self.section.max_shard_size,
            layout=self.section.layout or "full",
        )
        forget = self._forgotten = self._old(state, coming=state.global_step)
        if self.mirror is not None:
            self.mirror.leave(forget)
        return replace(job, forget=forget, share=self.section.share_unchanged), live

    def _start(self, job: Job, live: Live) -> None:
        if self.section.async_save and is_available():
            try:
                self._background.start(job, live)
                self._in_flight = job.target
                return
            except MemoryError as error:
                logger.warning(
                    "no room for a snapshot of the state (%s): training waits for every save", error
                )
                self.section = replace(self.section, async_save=False)
        self._note(lambda: write(job, live), job.target)

    def _finish(self) -> None:
        """Wait for the save in flight, if there is one."""
        if self._in_flight:
            self._note(self._background.wait)

    def _note(self, ask: Callable[[], Saved | None], target: Path | None = None) -> None:
        """Ask what has become of a save, and remember it."""
        target = target or self._in_flight
        try:
            saved = ask()
        except CheckpointError as error:
            self._in_flight = None
            self._bear(error)
            return
        if saved is None or target is None:
            return
        self._in_flight, self.newest = None, target
        self._done.append(step_of(target))
        if self.mirror is not None:
            self.mirror.offer(target, self._forgotten)
        if saved.problem:
            logger.warning("%s", saved.problem)
        logger.debug(
            "%s: %d bytes, %d of them shared, in %.2f s",
            target.name,
            saved.num_bytes,
            saved.num_shared,
            saved.seconds,
        )

    def _bear(self, error: CheckpointError) -> None:
        if self.section.on_save_error == "stop":
            raise error
        logger.warning("%s; going on, newest checkpoint: %s", error, self.newest)

    def _old(self, state: TrainerState, coming: int | None = None) -> list[str]:
        """The names of the checkpoints to delete, once that of step ``coming`` is committed."""
        saved = {step_of(path): self._when(path) for path in committed(self.output_dir)}
        now = time.time()
        if coming is not None:
            saved[coming] = self._created[coming] = now
        newest = self.newest if coming is None else None  # the coming one takes its place
        protected = {step_of(path) for path in (self.resumed_from, newest) if path}
        if self.mirror is not None:
            saved = dict.fromkeys(self.mirror.steps) | saved
            protected |= self.mirror.protected
        if state.best_global_step is not None:
            protected.add(state.best_global_step)
        verdicts = retention.choose(
            saved,
            self.section.rule(),
            now=now,
            metrics=retention.metrics_in(state.log_history, self.metric),
            greater=self.greater,
            protected=protected,
        )
        return [self.path_of(verdict.step).name for verdict in verdicts if not verdict.stays]

    def _when(self, path: Path) -> float | None:
        """When a checkpoint was saved, in seconds since 1970; None where nobody asks or knows."""
        if self.section.keep_hours is None:
            return None
        step = step_of(path)
        if step not in self._created:
            try:
                created = open_checkpoint(path).manifest.created
                self._created[step] = retention.seconds(created)
            except CheckpointError:
                self._created[step] = None
        return self._created[step]

    def _for_people(self, state: TrainerState) -> bytes:
        best = None if state.best_global_step is None else str(self.path_of(state.best_global_step))
        content = state.for_people(self.steps, best)
        return (json.dumps(_finite(content), indent=2, sort_keys=True) + "\n").encode()


def _finite(value: object) -> object:
    """``value`` with null for what strict JSON has no word for: nan and the infinities."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
