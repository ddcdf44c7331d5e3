"""The loop's side of checkpoints: what goes into one, and what becomes of old ones.

A save stops the loop for a snapshot only; the rest happens in the background, and the loop asks at
every step what has become of it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal

from ..checkpoint.background.in_flight import InFlightSave, end
from ..checkpoint.disk import retention
from ..checkpoint.disk.commit import committed, step_of
from ..checkpoint.disk.retention import Times
from ..checkpoint.disk.trainer_state import finite
from ..checkpoint.saving.job import Job, Saved
from ..checkpoint.saving.preparation import LiveTensors, prepare
from ..checkpoint.saving.writer_group import WriterGroup
from ..checkpoint.section import CheckpointSection
from ..checkpoint.state.states import Stateful
from ..errors import CheckpointError
from ..parallel.world import ALONE, World
from ..remote.mirror import Mirror
from ..storage.files import exists
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
    world: World = ALONE
    mirror: Mirror | None = None  # that keeps a copy of the run in a store
    seconds_stopped: float = 0.0  # how long saves have kept the loop waiting
    num_left_out: int = 0  # saves that were not taken because one was in flight
    _flight: InFlightSave = field(default_factory=InFlightSave)
    _forgotten: Sequence[str] = ()  # names that the save in flight takes the place of
    _done: list[int] = field(default_factory=list)  # committed steps that nobody was told of

    def __post_init__(self) -> None:
        self._times = Times(self.output_dir)
        world = self.world
        self._crew = WriterGroup(
            self.section.layout or "full", world.rank, world.size, world.axes, world.gathered
        )

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and self.world.size > 1:
            return  # another one's part may never come; left alone, the writer finishes or gives up
        end(self.close, error)

    def close(self) -> None:
        """Wait for the save in flight and end the process that writes. Raises as ``save``."""
        try:
            self._finish()
        finally:
            self._flight.close()

    def save(self, state: TrainerState, states: Mapping[str, Stateful], *, insist: bool) -> None:
        """Save step ``state.global_step``: it is committed once ``collect`` tells so.

        If a save is still in flight it is waited for, or this one is left out, as the recipe says;
        never if the loop must ``insist``.

        Raises:
            CheckpointError: this save or the last one failed, and the recipe says to stop then; no
                earlier checkpoint was touched.
        """
        began = time.monotonic()
        is_spared = self.world.is_main and self._is_spared(state.global_step, insist)
        if self.world.from_main(is_spared):  # all do what it does
            return
        try:
            self._finish()
            job, live = self._prepare(state, states)
            in_background = self.section.async_save
            self._note(lambda: self._flight.start(job, live, in_background=in_background))
        except CheckpointError as error:
            self._bear(error)
        finally:
            self.seconds_stopped += time.monotonic() - began

    def collect(self, *, wait: bool = False) -> list[int]:
        """The steps committed since the last call. Raises as ``save``."""
        if wait:
            began = time.monotonic()
            self._finish()
            self.newest = self.world.from_main(self.newest)
            self.seconds_stopped += time.monotonic() - began
        else:
            self._note(self._flight.poll)
        if self.mirror is not None:
            self.mirror.poll()
        done, self._done = self._done, []
        return done

    def forget_old(self, state: TrainerState) -> None:
        """Delete what retention lets go: never the newest, the best, or the one resumed from."""
        if not self.world.is_main:
            return
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

    def _is_spared(self, step: int, insist: bool) -> bool:
        """Whether the state of ``step`` lies there already, or is left out for one in flight."""
        target = self.path_of(step)
        if target in (self.newest, self._flight.target):
            return True
        if self._flight.target and self.section.on_save_busy == "skip" and not insist:
            self._note(self._flight.poll)
            if self._flight.target:
                self._leave_out(target)
                return True
        return False

    def _leave_out(self, target: Path) -> None:
        self.num_left_out += 1
        logger.warning(
            "save of %s skipped (%d so far): %s is still being written; save less often, or "
            "set checkpoint.on_save_busy: wait",
            target.name,
            self.num_left_out,
            self._flight.target.name if self._flight.target else "",
        )

    def _prepare(
        self, state: TrainerState, states: Mapping[str, Stateful]
    ) -> tuple[Job, LiveTensors]:
        parent = self.newest or self.resumed_from
        job, live = prepare(
            self.output_dir,
            state.global_step,
            states,
            kind=self.kind,
            companions={**self.companions, "trainer_state.json": self._for_people(state)},
            parent=parent.name if parent else None,
            max_shard_size=self.section.max_shard_size,
            crew=self._crew,
        )
        job = replace(job, share=self.section.share_unchanged)
        if not self.world.is_main:
            return job, live
        forget = self._forgotten = self._old(state, coming=state.global_step)
        if self.mirror is not None:
            self.mirror.leave(forget)
        return replace(job, forget=forget), live

    def _finish(self) -> None:
        """Wait for the save in flight, if there is one."""
        self._note(self._flight.wait)

    def _note(self, ask: Callable[[], Saved | None]) -> None:
        """Ask what has become of a save, and remember it."""
        try:
            saved = ask()
        except CheckpointError as error:
            self._bear(error)
            return
        if saved is not None and saved.is_committed:
            self.newest = saved.path
            self._done.append(step_of(saved.path))
            if self.mirror is not None:
                self.mirror.offer(saved.path, self._forgotten)

    def _bear(self, error: CheckpointError) -> None:
        if self.section.on_save_error == "stop":
            raise error
        logger.warning("%s; training continues, latest checkpoint: %s", error, self.newest)

    def _old(self, state: TrainerState, coming: int | None = None) -> list[str]:
        """The names of the checkpoints to delete, once that of step ``coming`` is committed."""
        saved = self._times.of(self.section.rule(), coming=coming)
        newest = self.newest if coming is None else None  # the coming one takes its place
        protected = {step_of(path) for path in (self.resumed_from, newest) if path}
        if self.mirror is not None:
            saved = dict.fromkeys(self.mirror.steps) | saved
            protected |= self.mirror.protected
        if state.best_global_step is not None:
            protected.add(state.best_global_step)
        verdicts = retention.decide(
            saved,
            self.section.rule(),
            now=time.time(),
            metrics=retention.metrics_in(state.log_history, self.metric),
            greater=self.greater,
            protected=protected,
        )
        return [self.path_of(verdict.step).name for verdict in verdicts if not verdict.stays]

    def _for_people(self, state: TrainerState) -> bytes:
        step = state.best_global_step
        best = None if step is None else self.path_of(step)
        coming = (self.path_of(state.global_step), self._flight.target)
        is_there = best is not None and (best in coming or exists(best))  # not each step is saved
        content = state.for_people(self.steps, str(best) if is_there else None)
        return (json.dumps(finite(content), indent=2, sort_keys=True) + "\n").encode()
