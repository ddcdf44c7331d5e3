"""Compute steps of a run again, in a folder of their own, and compare them with what the run has
logged and saved. The folder of the run is only read, also while it trains.

The state of a checkpoint and the steps after it are a pure function of the recipe, the rows and the
surroundings (``surroundings``), so this is ``build`` and ``fit`` once more: from the nearest
checkpoint before the first step, or from the seed; with the settings, threads and ranks of the
launch that computed each step; with logs, and where they matter evaluations, at the run's steps.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from signal import Signals
from typing import Any

import torch

from ..checkpoint.disk.commit import claim, clean_leftovers, committed, named, step_of
from ..checkpoint.disk.folder import TrainerStateFile, load_trainer_state, open_checkpoint
from ..checkpoint.disk.retention import origin_of
from ..checkpoint.layouts.detection import plain
from ..checkpoint.looking.diff import TensorChange, compare_tensors
from ..checkpoint.verification import verify_checkpoint
from ..data.section import DataSection
from ..errors import CheckpointError, RunError
from ..parallel.world import World, explain_peer_loss
from ..recipe.files import RUN_RECIPE
from ..storage import files
from ..storage.folder_lock import NAME as LOCK
from ..storage.folder_lock import is_held
from ..training.arguments import Context
from ..training.callback import Metrics, TrainerCallback, TrainerControl, TrainerState
from ..training.callbacks.metric_files import (
    METRICS,
    Key,
    Record,
    key_of,
    lines_of,
    repeatable,
    strict,
)
from ..training.out_of_memory import FILE as FITTED_SIZES
from ..training.trainer import Trainer
from ..training.windows import Place
from ._launch import observed
from .assembly import build
from .foreign_resume import writer_of
from .launch_recipe import LaunchRecipe
from .parts import Start
from .surroundings import Difference, Launch, differences, launch_of, launches_in
from .training_run import explain_out_of_memory, located

logger = logging.getLogger(__name__)
ROUNDING = 1e-3  # the largest relative difference of a figure that rounding explains


@dataclass(frozen=True)
class Arm:
    """Steps that are computed in one go: those of one launch, or of several that are alike."""

    last: int
    launch: Launch | None  # of the last step; None: the run has no record of launches


@dataclass(frozen=True)
class ReplayPlan:
    """Which steps are computed again, from where, and with what they are compared."""

    run: Path
    first: int
    last: int
    start: Path | None  # the checkpoint before ``first``; None: the seed
    arms: Sequence[Arm]
    logged: Mapping[Key, Record]  # all lines of the run
    saved: Path | None  # the last checkpoint among the steps
    skipped: Sequence[Place] = ()  # windows that the run has skipped, as its latest state knows

    @property
    def start_step(self) -> int:
        """The step after which the computation begins."""
        return 0 if self.start is None else step_of(self.start)

    @classmethod
    def of(cls, run: Path, first: int, last: int) -> ReplayPlan:
        """The plan for the steps from ``first`` to ``last``. Raises ``RunError``: they cannot be
        computed again, with the reason."""
        launches, checkpoints = launches_in(run), committed(run)
        history, skipped = _known_to(checkpoints)
        logged = lines_of(run / METRICS, history)
        end = _last_of(logged, checkpoints)
        if last > end:
            raise RunError(f"{run}: is at step {end:,}, so there is no step {last:,} to replay")
        start = _start_before(run, first, launches)
        begin = 0 if start is None else step_of(start)
        arms = []
        for _, steps in groupby(range(begin + 1, last + 1), lambda s: _set_by(launches, s)):
            *_, step = steps
            arms.append(Arm(step, launch_of(launches, step)))
        ranks = {arm.launch.ranks: arm.last for arm in arms if arm.launch}
        if len(ranks) > 1:
            parts = ", ".join(f"to step {step} on {count}" for count, step in ranks.items())
            raise RunError(
                f"{run}: the steps from {begin + 1} to {last} were computed on several numbers of "
                f"ranks ({parts}), and a replay has one; name steps before that change, or behind "
                "a checkpoint after it (checkpoint.keep_every keeps more of them)"
            )
        inside = [path for path in checkpoints if begin < step_of(path) <= last]
        inside = [path for path in inside if verify_checkpoint(path, full=False).ok]
        return cls(run, first, last, start, arms, logged, [None, *inside][-1], skipped)

    def held(self, scratch: Path) -> ReplayPlan:
        """The plan with copies in ``scratch`` of the checkpoints that it needs, which share their
        files, if a process trains in the run and may delete them meanwhile."""
        if files.exists(self.run / FITTED_SIZES):
            shutil.copyfile(self.run / FITTED_SIZES, scratch / FITTED_SIZES)
        if is_held(self.run / LOCK) is False:
            return self
        places = (path and scratch / "run" / path.name for path in (self.start, self.saved))
        start, saved = places
        for source, target in ((self.start, start), (self.saved, saved)):
            if source is not None and target is not None:
                copy_checkpoint(source, target)
        return replace(self, start=start, saved=saved)


def _last_of(logged: Mapping[Key, Record], checkpoints: Sequence[Path]) -> int:
    return max([0, *(step for step, _ in logged), *map(step_of, checkpoints)])


def last_step_of(run: Path) -> int:
    """The last step of ``run`` that has been logged or saved."""
    checkpoints = committed(run)
    return _last_of(lines_of(run / METRICS, _known_to(checkpoints)[0]), checkpoints)


def _set_by(launches: Sequence[Launch], step: int) -> tuple[object, ...] | None:
    """What a replay can set of the launch that computed ``step``."""
    if (launch := launch_of(launches, step)) is None:
        return None
    return launch.ranks, launch.settings, launch.surroundings.get("threads")


def copy_checkpoint(source: Path, target: Path) -> int:
    """Give ``target`` the files of a checkpoint, shared where the disk can do that; returns the
    bytes that were copied. Raises ``RunError`` if its run deletes it meanwhile."""
    num_copied = 0

    def copy(old: str, new: str) -> None:
        nonlocal num_copied
        if not files.share(Path(old), Path(new)):
            shutil.copyfile(old, new)
            num_copied += Path(new).stat().st_size

    try:
        shutil.copytree(source, target, copy_function=copy)
    except (FileNotFoundError, shutil.Error) as error:
        raise RunError(
            f"{source}: the run has deleted it meanwhile; start the same command again"
        ) from error
    return num_copied


def _known_to(checkpoints: Sequence[Path]) -> tuple[list[Any], list[Place]]:
    """The log of the run, and the windows that it has skipped, as its latest state has them."""
    for latest in reversed(checkpoints):
        with suppress(CheckpointError):  # a damaged one is named where it is needed
            state = plain(dict(open_checkpoint(latest).skeleton()))["trainer"]
            places = [(epoch, index) for epoch, index in state.get("skipped_windows", ())]
            return TrainerStateFile.of(load_trainer_state(latest)).history, places
    return [], []


def refuse_foreign(run: Path) -> None:
    """Raise ``RunError`` for a folder that is of no run of Surefoot, and name whose it is."""
    writers = (writer_of(folder) for folder in (run, *reversed(named(run))))
    writer = next((each.title for each in writers if each is not None), None)
    if writer is None:
        raise RunError(f"{run}: no {RUN_RECIPE}, so it is not the folder of a run")
    raise RunError(
        f"{run}: a run of {writer}, which does not record all that its steps depend on, so they "
        "cannot be computed again. Surefoot continues it: checkpoint.resume=CHECKPOINT in a new "
        "train.output_dir"
    )


def _start_before(run: Path, step: int, launches: Sequence[Launch]) -> Path | None:
    """The latest valid checkpoint before ``step``; None: the seed. Raises ``RunError``."""
    for path in reversed([path for path in committed(run) if step_of(path) < step]):
        report = verify_checkpoint(path, full=True)
        if report.ok:
            return path
        logger.warning("%s is skipped: %s", path.name, report.problems[0])
    given, origin = launches[0].facts.get("resumed_from_path") if launches else None, origin_of(run)
    if origin is not None:
        given = f"{origin[0]}/checkpoint-{origin[1]}"
    if given is None:
        return None
    place = Path(given)
    if files.is_folder(place) and step_of(place) < step:
        return place
    is_later = "which has later steps; replay the run of that one"
    raise RunError(
        f"{run}: no checkpoint is before step {step}, and the run has not begun from its seed: it "
        f"began from {given}, "
        f"{is_later if step_of(place) >= step else 'which is not there any more'}"
    )


@dataclass(frozen=True)
class Gap:
    """A figure of a line that is not what was logged."""

    step: int
    name: str
    logged: float | None
    replayed: float | None

    @property
    def relative(self) -> float:
        """The difference as a share of the larger one; infinite where one is missing."""
        a, b = self.logged, self.replayed
        if a is None or b is None:
            return math.inf
        return abs(a - b) / max(abs(a), abs(b))


@dataclass(frozen=True)
class ReplayReport:
    """What a replay has found."""

    plan: ReplayPlan
    reached: int  # the last step that was computed
    signal: Signals | None
    num_equal: int  # lines
    gaps: Sequence[Gap]  # in the order of steps
    tensors: Sequence[TensorChange] | None  # None: no checkpoint was reached
    differing: Sequence[Difference]  # surroundings
    are_known: bool  # whether the run has recorded its surroundings
    surroundings: Mapping[str, Any] = field(default_factory=dict)  # of now

    @property
    def num_compared(self) -> int:
        """Lines and tensors that were compared."""
        steps = {gap.step for gap in self.gaps}
        return self.num_equal + len(steps) + len(self.tensors or ())

    @property
    def is_equal(self) -> bool:
        """Whether something was compared, and all of it is equal to the bit."""
        return self.num_compared > 0 and not self.gaps and not self.odd_tensors

    @property
    def is_rounding(self) -> bool:
        """Whether all figures that differ may differ by rounding."""
        return all(gap.relative <= ROUNDING for gap in self.gaps)

    @property
    def odd_tensors(self) -> Mapping[str, float]:
        """The tensors that differ, and by which share of their norm; infinite if that is none."""
        odd = [each for each in self.tensors or () if each.verdict != "equal"]
        return {t.name: math.inf if t.figures is None else t.figures.relative for t in odd}


@dataclass
class Repeat(TrainerCallback):
    """Logs and evaluates where the run did, and ends the steps after ``last``."""

    logged: Mapping[Key, Record]
    last: int
    saves: frozenset[int]  # steps whose state is needed
    evaluates: bool
    records: list[Record] = field(default_factory=list)

    def on_step_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """As the run did, whether by steps, minutes, epochs or a callback."""
        step = state.global_step
        control.should_log |= (step, False) in self.logged
        control.should_evaluate |= self.evaluates and (step, True) in self.logged
        control.should_save |= step in self.saves
        control.should_training_stop |= step >= self.last

    def on_log(
        self, args: Context, state: TrainerState, control: TrainerControl, logs: Metrics
    ) -> None:
        """Keep the record."""
        self.records.append(strict(logs))


class Watcher(TrainerCallback):
    """A callback that looks on at the steps, and changes no bit of them."""

    def watch(self, trainer: Trainer, section: DataSection) -> None:
        """Before the steps of ``trainer``, whose rows ``section`` describes."""

    def finish(self) -> None:
        """After the last step, while the folder of the replay is still there."""


def compute(
    plan: ReplayPlan,
    scratch: Path,
    world: World,
    companions: Mapping[str, bytes] | None = None,
    watching: Sequence[Watcher] = (),
) -> ReplayReport:
    """Compute the steps of ``plan`` again in ``scratch``, and compare them. With ``companions``,
    the last state is saved as the run would have: after its evaluations, and with these files
    beside the weights. ``watching`` look on. A collective call."""
    last = plan.arms[-1].launch  # all of a plan are on as many ranks
    if last is not None and last.ranks != world.size:
        raise RunError(
            f"{plan.run}: the steps to {plan.last} were computed on {last.ranks} ranks; start as "
            "many"
        )
    plan = world.on_main(lambda: plan.held(scratch))
    start, records, trainer = plan.start, list[Record](), None
    saved = set() if plan.saved is None else {step_of(plan.saved)}
    for arm in plan.arms:
        launch, is_last = arm.launch, arm is plan.arms[-1]
        settings, ranks = ({}, None) if launch is None else (launch.settings, launch.ranks)
        threads = None if launch is None else launch.surroundings.get("threads")
        if threads and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(int(threads))
        recipe = LaunchRecipe.of(plan.run, settings, ranks, scratch)
        evaluates = companions is not None or recipe.follows_evaluations
        is_needed = companions is not None or not is_last
        saves = frozenset(saved | {arm.last} if is_needed else saved)
        repeat = Repeat(plan.logged, arm.last, saves, evaluates, records)
        trainer = build(
            located(recipe.recipe, world),
            callbacks=(repeat, *watching),
            resume=start and Start.of(start, world, is_verified=True),
            world=world,
        )
        for watcher in watching:
            watcher.watch(trainer, recipe.datasets)
        _fit(trainer, plan, (repeat, *watching), companions or {}, evaluates=evaluates)
        start = trainer.saver.path_of(trainer.state.global_step)
        if trainer.signal is not None:
            break
    assert trainer is not None, "a plan has steps"
    if trainer.signal is None:
        for watcher in watching:
            watcher.finish()
    return _compared(plan, trainer, records, scratch)


def _fit(
    trainer: Trainer,
    plan: ReplayPlan,
    callbacks: Sequence[TrainerCallback],
    companions: Mapping[str, bytes],
    *,
    evaluates: bool,
) -> None:
    """Let ``trainer`` take the steps, watched by ``callbacks`` and those of the recipe."""
    # Those that every run has write into its folder, and act at steps of their own.
    kept = tuple(type(each) for each in (*callbacks, *trainer.section.callbacks))
    for member in trainer.callbacks.members:
        if not isinstance(member, kept):
            trainer.callbacks.pop(member)
    state = trainer.state
    state.skipped_windows = list(dict.fromkeys([*state.skipped_windows, *plan.skipped]))
    if not evaluates:
        state.pending = []
    trainer.saver.companions = {**trainer.saver.companions, **companions}
    explain_rank_loss = explain_peer_loss(trainer.world.rank, lambda: trainer.signal)
    with trainer.stop, explain_rank_loss, explain_out_of_memory(trainer):
        trainer.fit()


def _compared(
    plan: ReplayPlan, trainer: Trainer, records: Sequence[Record], scratch: Path
) -> ReplayReport:
    num_equal, gaps = 0, list[Gap]()
    for record in records:
        if (logged := plan.logged.get(key_of(record))) is None:
            continue
        before, now = repeatable(logged), repeatable(record)
        num_equal += before == now
        gaps += [
            Gap(key_of(record)[0], name, before.get(name), now.get(name))  # type: ignore[arg-type]
            for name in {**before, **now}
            if before.get(name) != now.get(name)
        ]
    tensors, saved, reached = None, plan.saved, trainer.state.global_step
    if trainer.world.is_main and saved is not None and step_of(saved) <= reached:
        copy = scratch / saved.name
        if not files.is_folder(copy):
            raise CheckpointError(f"{copy}: could not be saved, so no tensors are compared")
        tensors = list(compare_tensors(saved, copy))
    launch = plan.arms[-1].launch
    known = {} if launch is None else launch.surroundings
    now_here = observed(trainer, {} if launch is None else launch.settings)
    differing = differences(known, now_here)
    return ReplayReport(
        plan, reached, trainer.signal, num_equal, gaps, tensors, differing, bool(known), now_here
    )


@contextmanager
def scratch_folder(run: Path, place: Path | None, world: World) -> Iterator[Path]:
    """An empty folder beside ``run``, or in ``place``; or where temporary files are, if nothing may
    be written there. It is removed at the end, and those of killed processes at the beginning."""
    beside = place or run.absolute().parent
    if place is None and not os.access(beside, os.W_OK):
        beside = Path(tempfile.gettempdir())
    with ExitStack() as stack:
        if world.is_main:
            target = beside / f"{run.absolute().name}.replay"
            files.make_folder(beside)
            clean_leftovers(target)
            locked = stack.enter_context(claim(target, files.open_folder))
            stack.callback(files.remove_tree, locked.path)
        yield world.from_main(locked.path if world.is_main else None)
