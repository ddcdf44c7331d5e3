"""The training loop. It does not depend on stages, methods, parallelism or file formats."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from signal import Signals
from traceback import clear_frames
from typing import Any

from ..batch import Window
from ..checkpoint.disk.commit import step_of
from ..checkpoint.disk.strict_json import finite
from ..checkpoint.saving.saver import AsyncSaver
from ..checkpoint.state.roles import MODEL, Stateful
from ..checkpoint.state.states import RandomState
from ..data.data_order import Index
from ..errors import STOP_SIGNALS, CheckpointError, LostPeerError
from ..model.numerics import seed_everything
from ..parallel.progress import DATA, ENDING, EVALUATING, SAVING, TRAINING
from ..parallel.world import ALONE, World
from ..storage.files import exists
from .callback import Callbacks, TrainerControl, TrainerState
from .callbacks.step_files import StepFiles
from .control import LogAccumulator, StopSignal, saying_what_is_lost
from .evaluation import (
    Evaluation,
    EvaluationSet,
    prefixed,
    record_evaluation,
    settle_best,
    speeds,
)
from .restoring import readable, restore
from .section import TrainSection
from .stage import POLICY, Stage
from .step import (
    MAX_ROLLBACKS,
    Learner,
    PendingMetrics,
    StepMetrics,
    all_or_none,
    check_gradient,
    explain,
    give_up,
    warn_of_rollback,
    warn_of_skip,
)
from .windows import Place, StepInput, Windows

_FAILED = "another rank has failed; the cause is in that rank's own error message"


class _BrokenOffError(Exception):
    """A signal or an error arrived during an evaluation."""


@dataclass(frozen=True)
class _Taken:
    """A step whose metrics have not been read yet: the device computes the next step until
    something is to be logged, measured or saved."""

    number: int
    place: Place  # of its window
    figures: PendingMetrics
    groups: Sequence[Index]  # the rows of each micro-batch, by their places in the window


@dataclass
class _Progress:
    """Loop variables that are in no checkpoint."""

    unread: _Taken | None = None
    agreed: Signals | None = None  # the signal on which the ranks have agreed to leave
    rollbacks: int = 0
    num_zero: int | None = 0  # steps whose gradient is 0; None: one was not
    micro_batch: int = 0  # the index of the one that runs
    eval_batches: int = 0  # of this evaluation
    is_trying: bool = False  # no event of a trial is emitted
    is_failing: bool = False  # whether some rank keeps an error, with which the run ends
    is_room_checked: bool = False  # for the snapshot of a save


@dataclass(frozen=True)
class Trainer:
    """Everything one run needs, made by ``run.assembly``; ``states`` is all that a resume needs."""

    section: TrainSection
    stage: Stage
    learners: Mapping[str, Learner]  # by role, the policy first
    windows: Windows
    evals: Mapping[str, EvaluationSet]
    evaluation: Evaluation
    saver: AsyncSaver
    callbacks: Callbacks
    state: TrainerState
    control: TrainerControl
    interval: LogAccumulator
    step_files: StepFiles
    world: World = ALONE
    judged_on: str = ""  # hash of what is evaluated, and of what measures it beside the weights
    save_steps: int | None = None  # of the recipe, for `trainer_state.json`
    feeder: AbstractContextManager[object] = field(default_factory=nullcontext)  # while data comes
    stop: StopSignal = field(default_factory=StopSignal)
    _progress: _Progress = field(default_factory=_Progress, init=False)

    @property
    def policy(self) -> Learner:
        """The learner of the model that the recipe names."""
        return self.learners[POLICY]

    @property
    def states(self) -> dict[str, Stateful]:
        """The content of a checkpoint. A schedule is a function of the step and of ``trainer``."""
        files: dict[str, Stateful] = {}
        for role, learner in self.learners.items():
            name = MODEL if role == POLICY else role
            files |= learner.network.states(learner.optimizer_state, name)
        return {
            **files,
            "scaler": self.policy.step.scaler,
            "loader": self.windows,
            "trainer": self.state,
            "callbacks": self.callbacks,
            "random": RandomState(),
        }

    @property
    def signal(self) -> Signals | None:
        """The signal that has ended the run, if one has."""
        return self._progress.agreed or self.stop.received

    def fit(self) -> TrainerState:
        """Train until ``max_steps``, a signal or ``control.stop_signal``, which all end in a save,
        or until ``control.should_training_stop``.
        Raises ``RunError`` for NaN and infinity if ``on_nan`` is stop, ``CheckpointError`` if a
        save failed and ``on_save_error`` is stop; and what any other part raises, once the last
        whole step is saved."""
        self.control.should_training_stop, self.control.stop_signal = False, None
        self._begin_step_files()
        self.policy.module.train()
        self.callbacks.emit("on_train_begin")
        self._progress.is_failing = False
        with saying_what_is_lost(self.callbacks, self.saver):
            with self.stop, self.feeder, self.saver, self.world.progress.during(TRAINING):
                for flag in self.state.pending:
                    setattr(self.control, flag, True)
                if self.section.on_nan == "rollback" and self.saver.newest is None:
                    self.save()  # somewhere to go back to
                self._act()
                while not self._is_done():
                    self._turn()
                    self._act()
                self._collect(wait=True)
            if self.callbacks.error is not None or self._progress.is_failing:
                raise self.callbacks.error or LostPeerError(_FAILED)
        self.world.progress.enter(ENDING)
        self.callbacks.emit("on_train_end")
        return self.state

    def settle_best(self) -> None:
        """Find the best evaluation again, by what the recipe says now, in a state that was
        restored. A collective call."""
        state = self.state
        if self.world.is_main:
            settle_best(self.section, state, self.judged_on, self.saver.has)
        best = state.best_metric, state.best_global_step, state.judgement, state.reductions
        state.best_metric, state.best_global_step, judged, reductions = self.world.from_main(best)
        state.judgement.load_state_dict(asdict(judged))
        state.reductions.load_state_dict(reductions.state_dict())

    def try_heaviest(self) -> None:
        """Run the window with the largest micro-batch forward and backward, and drop the gradients:
        what does not fit is found before the first step. A collective call."""
        self._progress.is_trying = True
        self.windows.memory.step = self.state.global_step + 1
        random = RandomState()
        drawn = random.state_dict()

        def work() -> None:
            if window := self.windows.heaviest():
                self._all_gradients(window)

        self.windows.memory.train(work, work, clean=self._drop_gradients, place=self._rows)
        self._drop_gradients()
        random.load_state_dict(drawn)
        self._progress.is_trying = False

    def predict(self, examples: EvaluationSet) -> dict[str, float]:
        """Metrics over ``examples`` as ``predict_loss``, …; nothing changes. A collective call."""
        metrics = self.measure({"": examples}, "predict")
        self.callbacks.emit("on_predict", metrics=metrics)
        return metrics

    def measure(self, sets: Mapping[str, EvaluationSet], prefix: str) -> dict[str, float]:
        """Metrics over each of ``sets``, by its name, at any time; nothing changes, and no signal
        breaks it off. A collective call."""
        with self.world.progress.during(EVALUATING):
            return prefixed({n: self._measure(x, may_leave=False) for n, x in sets.items()}, prefix)

    def _bears(self, error: Exception) -> bool:
        """Keep ``error`` until the last whole step is saved; False: some rank cannot join."""
        is_alone = self.world.size == 1
        if not (is_alone or getattr(error, "is_everywhere", False)):
            return False
        clear_frames(error.__traceback__)  # which hold the tensors of the pass
        return self.callbacks.defers(error)

    def _is_done(self) -> bool:
        return (
            self.control.should_training_stop
            or self._is_leaving
            or self.state.global_step >= self.state.max_steps
        )

    def _turn(self) -> None:
        """One optimizer step, on the next window or on the next part of a prepared one."""
        windows, loader = self.windows, self.windows.loader
        # A rollback comes by here again, with one window more to leave out.
        windows.leave_out(self.state.skipped_windows)
        is_first, random = windows.is_between and loader.window == 0, RandomState()
        drawn = random.state_dict()
        windows.memory.step = self.state.global_step + 1
        self.world.progress.step(self.state.global_step + 1)
        try:
            with self.world.progress.during(DATA):
                turn = windows.next_turn()
            self.world.progress.prepared(turn.seconds)
            self.interval.spend(turn.seconds)
            if is_first:
                self.control.should_epoch_stop = False
                self.callbacks.emit("on_epoch_begin")
            pending = self._passed(turn) if turn.window else []
        except Exception as error:  # data, a reward, a picture: no weight has changed yet
            if not self._bears(error):
                raise
            for learner in self.learners.values():
                learner.undo(self.state.global_step)
            windows.undo_turn()
            random.load_state_dict(drawn)
            return
        if pending and not self._update(turn, pending):
            return
        self.interval.note(turn.figures)
        if turn.rows is not None:
            self.step_files.add_rows(windows.num_rows_before(turn.place), turn.rows)
        if pending:
            self.callbacks.emit("on_step_end")
        if not windows.is_between:
            return
        while self.control.should_epoch_stop and loader.window:
            loader.skip()
            self.state.epoch = float(loader.epoch)
        if loader.window == 0:
            self.callbacks.emit("on_epoch_end")

    def _passed(self, turn: StepInput) -> list[PendingMetrics]:
        """Forward and backward of a step."""
        started = time.monotonic()
        self.callbacks.emit("on_step_begin")
        pending = self.windows.memory.train(
            lambda: self._all_gradients(turn.window),
            self._repeated,
            clean=self._drop_gradients,
            place=self._rows,
        )
        self.interval.spend(time.monotonic() - started)
        return pending

    def _update(self, turn: StepInput, pending: list[PendingMetrics]) -> bool:
        """Update the weights; False if it led back to the latest checkpoint."""
        started = time.monotonic()
        state, steps = self.state, [learner.step for learner in self.learners.values()]
        self.callbacks.emit("on_pre_optimizer_step")
        pending = all_or_none(pending)
        self.callbacks.is_deferring = True  # from here on, there is a step to lose
        for step, figures in zip(steps, pending, strict=True):
            step.update(figures)
        self.callbacks.emit("on_optimizer_step")
        for step in steps:
            step.optimizer.zero_grad(set_to_none=True)
        # One step late: the host reads the figures of step n while the device computes step n + 1,
        # and never waits for it.
        if not self._read():
            return False
        state.global_step += 1
        if not self._progress.is_room_checked:  # the optimizer has its state now
            self._progress.is_room_checked = True
            self.saver.check_room(sum(each.num_saved_bytes for each in self.learners.values()))
        groups = self.windows.row_groups()
        self._progress.unread = _Taken(state.global_step, turn.place, pending[0], groups)
        state.epoch = self.windows.loader.progress
        self.interval.spend(time.monotonic() - started)
        return True

    def _all_gradients(self, window: Window) -> list[PendingMetrics]:
        """Leave the gradients of each role's loss in its network."""
        return [self._gradients(role, window) for role in self.learners]

    def _repeated(self) -> list[PendingMetrics]:
        """The same for the same examples, in the smaller micro-batches of now."""
        self.state.train_batch_size = self.windows.memory.micro_batch_size
        return self._all_gradients(self.windows.repeat_turn().window)

    def _rows(self) -> str:
        """The rows of the micro-batch that runs."""
        return self.windows.rows_of(self._progress.micro_batch)

    def _drop_gradients(self) -> None:
        """Free what a pass that failed has left."""
        for learner in self.learners.values():
            learner.drop_gradients()

    def _gradients(self, role: str, window: Window) -> PendingMetrics:
        """Leave the gradients of one role's loss in its network."""
        learner, step = self.learners[role], self.state.global_step

        def before(index: int) -> None:
            self._progress.micro_batch = index
            tokens = window[index % len(window)].num_tokens  # a pipeline counts its stages, too
            self.world.progress.micro_batch(index, self._rows(), tokens)
            # Dropout of a micro-batch is that of a run that was never stopped, rolled back or
            # split: it depends on no number drawn before.
            seed_everything(self.section.seed, step, index, *self.world.draws)

        def after(index: int) -> None:
            if index + 1 < len(window) and not self._progress.is_trying:
                self.callbacks.emit("on_substep_end")

        if not learner.network.module.training:
            learner.network.module.train()
        learner.step.optimizer = learner.optimizer_at(step)
        return learner.step.gradients(
            window,
            partial(self.stage.loss, role),
            step=step,
            before=before,
            after=after,
        )

    def _read(self) -> bool:
        """Read the last step's metrics; False if they led back to the latest checkpoint."""
        taken, self._progress.unread = self._progress.unread, None
        if taken is None:
            return True
        figures = taken.figures.read()
        self.step_files.add(self.windows.num_rows_before(taken.place), taken.groups, figures)
        if not figures.is_usable and not self._bear(figures, taken):
            return False
        self._check_gradient(figures, taken.number)
        self.interval.add(figures)
        return True

    def _check_gradient(self, figures: StepMetrics, step: int) -> None:
        """Say so, if nothing is learned from the beginning."""
        progress = self._progress
        if progress.num_zero is None:
            return
        progress.num_zero = progress.num_zero + 1 if figures.grad_norm == 0 else None
        samples = self.stage.max_new_tokens > 0
        check_gradient(figures, step, progress.num_zero or 0, samples=samples)

    def _bear(self, figures: StepMetrics, taken: _Taken) -> bool:
        """Handle NaN or infinity, for which no update was applied. True to continue."""
        what, state, section = explain(taken.number, figures), self.state, self.section
        if section.on_nan == "skip":
            state.num_skipped_steps += 1
            if state.num_skipped_steps <= section.max_skipped_steps:
                if self.world.is_main:
                    warn_of_skip(what, section, state.num_skipped_steps)
                return True
        self._collect(wait=True)
        newest = self.saver.newest
        is_back = section.on_nan == "rollback" and self._progress.rollbacks < MAX_ROLLBACKS
        if not is_back or newest is None:
            self.step_files.flush()  # of which row it was
            raise give_up(what, section, newest, skipped=state.num_skipped_steps)
        # Kept aside: what is loaded knows only of those that were left out before it was saved.
        skipped = [*state.skipped_windows, taken.place]
        # Which knows only those that were left out before it.
        restore(readable(self.saver, newest, self.world), self.states, self.world)
        self.settle_best()
        self.windows.memory.recall(state.global_step)
        state.skipped_windows = skipped
        self._begin_step_files()
        self._progress.rollbacks += 1
        if self.world.is_main:
            warn_of_rollback(what, newest, len(skipped))
        return False

    def _begin_step_files(self) -> None:
        """Record steps and rows from where the run is."""
        loader = self.windows.loader
        num_rows = self.windows.num_rows_before((loader.epoch, loader.window))
        self.step_files.begin(self.state.global_step, num_rows)

    def _measure_all(self) -> dict[str, float]:
        """The metrics of all evaluation sets; some of their rollouts are written."""
        parts, started, self._progress.eval_batches = {}, time.monotonic(), 0
        for name, each in self.evals.items():
            parts[name] = self._measure(each)
            self.evaluation.kept.end(name)
        self.world.on_main(lambda: self.evaluation.kept.write(self.state.global_step))
        samples = sum(len(each.examples) for each in self.evals.values())
        counts = {"samples": samples, "steps": self._progress.eval_batches}
        return prefixed(parts, "eval") | speeds("eval", time.monotonic() - started, counts)

    def _measure(self, examples: EvaluationSet, *, may_leave: bool = True) -> dict[str, float]:
        def after() -> None:
            self.world.progress.tick()
            self._progress.eval_batches += 1
            self.callbacks.emit("on_prediction_step")
            if may_leave:
                self._agree()  # several ranks leave at the same batch
                if self._is_leaving:
                    raise _BrokenOffError

        random = RandomState()
        drawn = random.state_dict()
        try:
            return self.evaluation.measure(examples, after)
        finally:
            random.load_state_dict(drawn)

    def _act(self) -> None:
        """Act on the flags: log, evaluate, save, in that order."""
        control, state = self.control, self.state
        self._agree()
        state.pending = []
        if not self._catch_up():
            return
        is_logged, is_evaluated = control.should_log, control.should_evaluate and bool(self.evals)
        if is_logged:
            self.interval.log(self.callbacks)
        if is_evaluated and (self._is_leaving or not self._evaluate()):
            state.pending = ["should_evaluate"]
        control.should_log = control.should_evaluate = False
        if is_logged or is_evaluated:
            self._agree()  # on the errors of these
        control.should_save |= self._is_leaving
        if control.should_save:
            control.should_save = False
            self.save()
        self._collect()

    def _evaluate(self) -> bool:
        """Measure and log; False if a signal or an error has broken it off."""
        try:
            with self.world.progress.during(EVALUATING):
                metrics = self._measure_all()
            with self.policy.network.evaluating():  # callbacks generate without dropout
                record_evaluation(self.section, self.callbacks, metrics)
        except _BrokenOffError:
            return False
        except Exception as error:  # of held-out data, a reward, a metric
            if not self._bears(error):
                raise
            return False
        return True

    def _catch_up(self) -> bool:
        """If any flag is set, wait for the last step's metrics; False if they led back to the
        latest checkpoint, where no flag is set yet."""
        control, started = self.control, time.monotonic()
        is_any_set = control.should_log or control.should_evaluate or control.should_save
        if not is_any_set and not self._is_done():
            return True
        if is_usable := self._read():
            self.step_files.flush()
        self.interval.spend(time.monotonic() - started)
        if not is_usable:
            control.should_log = control.should_evaluate = control.should_save = False
        return is_usable

    @property
    def _is_leaving(self) -> bool:
        """Whether a signal or an error ends the run: one that was there when it was last looked
        for, as it may come between the decision to save and the end of the loop."""
        return self._progress.agreed is not None or self._progress.is_failing

    def _agree(self) -> None:
        """Look for a signal and an error, and make all ranks do the same: set the flags that any
        has set."""
        signal = self.stop.received or self.control.stop_signal
        if signal not in (None, *STOP_SIGNALS):  # 128 + SIGKILL, say, would be read as a kill
            signals = ", ".join(each.name for each in STOP_SIGNALS)
            error = ValueError(f"control.stop_signal: expected one of {signals}, got {signal!r}")
            signal = self.control.stop_signal = None
            if not self.callbacks.defers(error):
                raise error
        is_failing = self.callbacks.error is not None
        if self.world.size == 1:
            self._progress.agreed = None if signal is None else Signals(signal)
            self._progress.is_failing = is_failing
            return
        names = [each.name for each in fields(self.control) if each.name != "stop_signal"]
        local_flags = [float(getattr(self.control, name)) for name in names]
        # Else one rank would save while another trains, and both would wait for each other in
        # collectives.
        *flags, number, failing = self.world.largest(
            [*local_flags, float(signal or 0), float(is_failing)]
        )
        self._progress.is_failing = bool(failing)
        for name, flag in zip(names, flags, strict=True):
            setattr(self.control, name, bool(flag))
        self._progress.agreed = Signals(int(number)) if number else None

    def save(self) -> None:
        """Start to save this step. The last one, and a best one to end with, are never skipped."""
        state = self.state
        is_best = (
            self.section.load_best_model_at_end and state.best_global_step == state.global_step
        )
        with self.world.progress.during(SAVING):
            self.saver.save(
                state.global_step,
                self.states,
                companions={"trainer_state.json": self._state_file()},
                **self.ranking,
                insist=is_best or self._is_done(),
            )

    @property
    def ranking(self) -> dict[str, Any]:
        """What decides which checkpoints stay: the metric by step, and the best step."""
        state = self.state
        return {
            "metrics": state.evaluated(self.section.metric_for_best_model),
            "protected": () if state.best_global_step is None else (state.best_global_step,),
        }

    def _state_file(self) -> bytes:
        """``trainer_state.json``, for people and the Hugging Face Trainer."""
        step, best = self.state.best_global_step, None
        if step is not None:
            path = self.saver.path_of(step)
            # Not each step is saved; a save in flight is there, whenever it has ended.
            is_coming = step == self.state.global_step or path == self.saver.in_flight
            best = str(path) if is_coming or exists(path) else None
        steps = self.section.log_steps, self.section.eval_steps, self.save_steps
        content = self.state.for_people(steps, best)
        return (json.dumps(finite(content), indent=2, sort_keys=True) + "\n").encode()

    def _collect(self, *, wait: bool = False) -> None:
        """Call the callbacks for saves that have been committed."""
        with self.world.progress.during(SAVING):
            try:
                committed = self.saver.wait() if wait else self.saver.poll()
            except CheckpointError as error:
                if wait or not self.callbacks.defers(error):
                    raise
                committed = []  # the next step is saved, if it can be
        for path in committed:
            self._progress.rollbacks = 0
            if self.world.is_main:  # the others know only of their own part
                self.callbacks.emit_saved(step_of(path))
