"""A run that continues another one after any of its steps, in a folder of its own.

The folder is committed by one rename. It has the state of that step, whose files it shares with the
other run where the disk can do that, and ``origin.json``, which says where it comes from; it needs
nothing of the other run from then on.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.disk.commit import committed, new_folder, step_of
from ..checkpoint.disk.retention import ORIGIN, pin
from ..checkpoint.verification import verify_checkpoint
from ..errors import RunError
from ..parallel.section import ParallelSection
from ..parallel.watchdog import watched
from ..parallel.world import World
from ..recipe.files import RUN_RECIPE
from ..storage import files
from ..training.callbacks.metric_files import METRICS, lines_of
from ..training.callbacks.step_files import ROWS, STEPS
from ..training.out_of_memory import FILE as FITTED_SIZES
from .launch_recipe import ForkRecipe
from .replay import ReplayPlan, ReplayReport, compute, copy_checkpoint


@dataclass(frozen=True)
class Fork:
    """How a fork was made."""

    report: ReplayReport | None  # of the steps that were computed for it; None: its step was saved
    num_copied: int = 0  # bytes that are not shared with the other run


def has_saved(run: Path, step: int) -> bool:
    """Whether ``run`` has a valid checkpoint of ``step``."""
    saved = [path for path in committed(run) if step_of(path) == step]
    return bool(saved) and verify_checkpoint(saved[0], full=True).ok


def continue_run(
    run: Path,
    step: int,
    new: Path,
    overrides: Sequence[str],
    world: World,
    parallel: ParallelSection,
    *,
    place: str,
) -> Fork:
    """Make ``new`` a run that continues ``run``, that of ``place``, after ``step``, with
    ``overrides``. A collective call. Raises ``RunError``: the step cannot be had, or comes out
    as another one."""
    recipe = ForkRecipe.of(run, step, new, overrides)
    name = f"checkpoint-{step}"
    with ExitStack() as stack:
        made_folder = new_folder(new, may_be_empty=True)  # renamed at the end of the block
        folder = world.on_main(lambda: stack.enter_context(made_folder))
        if world.on_main(lambda: has_saved(run, step)):
            copied = world.on_main(lambda: copy_checkpoint(run / name, folder / name))
            made = Fork(None, copied)
        else:
            plan, scratch = world.on_main(lambda: ReplayPlan.of(run, step, step)), folder / "replay"
            world.on_main(lambda: files.make_folder(scratch))
            with watched(world, parallel, scratch) as watched_world:
                report = compute(plan, scratch, watched_world, {RUN_RECIPE: recipe.before})
            world.on_main(lambda: _take(report, scratch / name, folder / name))
            made = Fork(report)
        world.on_main(lambda: _describe(folder, run, place, recipe))
    return made


def _take(report: ReplayReport, saved: Path, target: Path) -> None:
    """Move the state that was computed to its place. Raises ``RunError`` if it is another one."""
    step = step_of(target)
    if report.signal is not None or report.reached < step:
        raise RunError(f"stopped at step {report.reached}, before step {step}; nothing was made")
    if not report.is_rounding:
        odd = report.gaps[0]
        raise RunError(
            f"{report.plan.run}: step {odd.step} is another one when it is computed again "
            f"({odd.name}: logged {odd.logged}, now {odd.replayed}), so nothing was made; "
            f"`surefoot replay {report.plan.run} --step {odd.step}` says what differs"
        )
    files.rename(saved, target)
    files.remove_tree(saved.parent)


def _describe(folder: Path, run: Path, place: str, recipe: ForkRecipe) -> None:
    """Write what makes ``folder`` a run: its recipe, its log so far, and where it comes from."""
    (step,) = map(step_of, committed(folder))
    origin = {
        "run": place,
        "step": step,
        "changes": recipe.changes,
        "time": time.time(),
    }
    lines = (record for (at, _), record in lines_of(run / METRICS).items() if at <= step)
    for name in (FITTED_SIZES, STEPS, ROWS):  # of which training cuts off what is behind the step
        if files.exists(run / name):
            shutil.copyfile(run / name, folder / name)
    files.write_new(folder / RUN_RECIPE, recipe.text)
    files.write_new(folder / ORIGIN, (json.dumps(origin, indent=2) + "\n").encode())
    files.write_new(folder / METRICS, "".join(f"{json.dumps(r)}\n" for r in lines).encode())
    pin(folder, step, is_pinned=True)
