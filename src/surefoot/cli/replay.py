"""``surefoot replay``: compute steps of a run again, and compare them with what it has logged."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import RunError, counted
from ..storage.remote import Address, default_cache, is_address
from ..terminal_text import one_line, visible
from .loading import loading, start_ranks

if TYPE_CHECKING:
    from ..parallel.section import ParallelSection
    from ..parallel.world import World
    from ..run.replay import ReplayReport
    from ..run.row_gradients import RowGradient
    from ..run.surroundings import Launch

_SHOWN = 6  # figures and tensors that differ
_ROWS = 10  # rows of a step
_SECONDS = 60.0  # of failures in a row, before a store is given up


@click.command()
@click.argument("place", metavar="RUN")
@click.option(
    "--step", "first", type=click.IntRange(1), required=True, metavar="N", help="The first step."
)
@click.option(
    "--to", "last", type=click.IntRange(1), metavar="M", help="The last step; by default N."
)
@click.option(
    "--scratch",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Where to work, if not beside RUN: as much room as a checkpoint takes.",
)
@click.option(
    "--rows", "has_rows", is_flag=True, help="Show each row's share of the gradient of step N."
)
def replay(
    place: str, first: int, last: int | None, scratch: Path | None, *, has_rows: bool
) -> None:
    """Compute steps of RUN, the folder or URL of a run, again, and compare them with its log.

    \b
    surefoot replay runs/orders --step 45
    surefoot replay runs/orders --step 41 --to 60
    surefoot replay runs/orders --step 45 --rows

    The steps are computed from the nearest checkpoint before N, or from the beginning, with the
    settings, threads and ranks of the launch that computed them. Every line of metrics.jsonl up to
    step M is compared, and each tensor of the last checkpoint up to M. RUN is only read, so it may
    still train. Exit code 0: all is equal to the bit; 1: something differs, or nothing could be
    compared; 2: the steps cannot be computed again.
    """
    last = first if last is None else last
    if last < first:
        raise click.UsageError(f"--to {last} is before --step {first}")
    run = local_run(place, first, last)
    with ranks_of(run, surrounded(run, last)) as (joined_world, parallel):
        from ..parallel.watchdog import watched
        from ..run.replay import ReplayPlan, compute, scratch_folder
        from ..run.row_gradients import RowGradients

        gradients = RowGradients(first) if has_rows else None
        plan = joined_world.on_main(lambda: ReplayPlan.of(run, first, last))
        with (
            scratch_folder(run, scratch, joined_world) as folder,
            watched(joined_world, parallel, folder) as world,
        ):
            report = compute(plan, folder, world, gradients=gradients)
            shares = gradients.rows() if gradients and report.reached >= first else []
            world.wait()
    if joined_world.is_main:
        click.echo(visible("\n".join([*lines_of(report), *_of_rows(first, shares)])))
    if report.signal is not None:
        raise SystemExit(128 + report.signal)
    if not report.is_equal:
        raise click.exceptions.Exit(1)


def local_run(place: str, first: int, last: int) -> Path:
    """The folder of the run at ``place``; of one in a store, a copy in the cache of what the steps
    from ``first`` to ``last`` need. Raises ``RunError`` unless it is a run of Surefoot."""
    from ..recipe.files import RUN_RECIPE, is_checkpoint

    if is_address(place):
        from ..checkpoint.looking.listing import stores

        address = Address(place)
        run = default_cache() / f"{address.slug}.replay"
        stored = stores().open_run(address, run, seconds=_SECONDS)
        before, inside = (
            [s for s in stored.steps if s < first],
            [s for s in stored.steps if first <= s <= last],
        )
        needed = {max(steps) for steps in (before, inside) if steps} or {*sorted(stored.steps)[:1]}
        for step in needed:
            stored.get(f"checkpoint-{step}")
        return run
    run = Path(place)
    if not run.is_dir():
        raise RunError(f"{run}: no such folder; name the folder of a run")
    if is_checkpoint(run):
        raise RunError(
            f"{run}: is a checkpoint; name the folder of its run, {run.absolute().parent}"
        )
    if not (run / RUN_RECIPE).is_file():
        with loading():
            from ..run.replay import refuse_foreign

        refuse_foreign(run)
    return run


def surrounded(run: Path, step: int) -> Launch | None:
    """The launch of ``run`` that computed ``step``. This process gets its variables of the
    environment, before torch reads them: what is set here stays, and the report names it."""
    from ..run.surroundings import launch_of, launches_in

    launch = launch_of(launches_in(run), step)
    variables = {} if launch is None else launch.surroundings.get("variables", {})
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    return launch


@contextmanager
def ranks_of(run: Path, launch: Launch | None) -> Iterator[tuple[World, ParallelSection]]:
    """As many ranks as ``launch`` of ``run`` had, and their mesh."""
    from ..run.launch_recipe import LaunchRecipe

    settings, ranks = ({}, None) if launch is None else (launch.settings, launch.ranks)
    parallel = LaunchRecipe.of(run, settings, ranks, run).parallel
    start_ranks(parallel)
    with loading():
        from ..parallel.world import joined

    with joined(parallel) as world:
        if ranks not in (None, world.size):
            raise RunError(f"{run}: these steps were computed on {ranks} ranks; start as many")
        yield world, parallel


def lines_of(report: ReplayReport) -> Iterator[str]:
    """What a replay has found, for people."""
    plan = report.plan
    begin = "the beginning of the run" if plan.start is None else plan.start.name
    yield f"replayed from {begin}: steps {plan.start_step + 1} to {report.reached}"
    yield from _of_lines(report)
    yield from _of_tensors(report)
    if not report.num_compared:
        yield _nothing(report)
    yield from _surroundings(report)
    for (step, is_evaluation), record in plan.logged.items():
        if plan.first <= step <= report.reached and not is_evaluation:
            names = ("loss", "grad_norm", "learning_rate")
            yield f"  step {step}: " + ", ".join(f"{n} {record[n]}" for n in names if n in record)


def _of_lines(report: ReplayReport) -> Iterator[str]:
    odd = {gap.step for gap in report.gaps}
    lines = counted(report.num_equal + len(odd), "logged line")
    if not odd:
        if report.num_equal:
            yield f"{lines}: equal to the bit"
        return
    if report.is_rounding:
        worst = max(report.gaps, key=lambda gap: gap.relative)
        yield (
            f"{lines}: equal up to rounding: largest difference {worst.relative:.2g} of "
            f"{worst.name}, first at step {min(odd)}"
        )
        return
    yield f"{lines}: {report.num_equal} equal to the bit; step {min(odd)} is the first that differs"
    for gap in [gap for gap in report.gaps if gap.step == min(odd)][:_SHOWN]:
        yield f"  {gap.name}: logged {gap.logged}, replayed {gap.replayed}"


def _of_tensors(report: ReplayReport) -> Iterator[str]:
    from ..run.replay import ROUNDING

    if report.tensors is None or (saved := report.plan.saved) is None:
        return
    tensors = f"{saved.name}: {counted(len(report.tensors), 'tensor')}"
    if not (odd := report.odd_tensors):
        yield f"{tensors}: equal to the bit"
        return
    name, worst = max(odd.items(), key=lambda item: item[1])
    how = "equal up to rounding" if worst <= ROUNDING else "other values"
    yield f"{tensors}: {how}: {len(odd)} differ, by at most {worst:.2g} of their norm ({name})"


def _of_rows(step: int, rows: Sequence[RowGradient]) -> Iterator[str]:
    if not rows:
        return
    total = sum(row.share for row in rows)
    yield (
        f"step {step}: {counted(len(rows), 'row')}, each run alone; their losses add up to "
        f"{sum(row.loss for row in rows):.6g}, and their shares of the gradient to {total:.4g}"
    )
    for row in rows[:_ROWS]:
        mean = f"{row.loss / row.weight:.4g} x {row.weight:g}" if row.weight else "none"
        yield f"  {row.share:.1%} of the gradient: {row.place}: loss {mean}, norm {row.norm:.4g}"
        yield f"    {one_line(row.text)}"
    if len(rows) > _ROWS:
        yield f"  and {len(rows) - _ROWS} more"


def _nothing(report: ReplayReport) -> str:
    """Why nothing was compared, and with which steps something is."""
    plan = report.plan
    later = sorted(step for step, _ in plan.logged if step > report.reached)
    cure = f"; the next line is of step {later[0]}: add --to {later[0]}" if later else ""
    return (
        "nothing was compared: the run has logged none of these steps, and saved none of their "
        f"checkpoints{cure}"
    )


def _surroundings(report: ReplayReport) -> Iterator[str]:
    launch = report.plan.arms[-1].launch
    if launch is None or not report.are_known:
        yield "the run has not recorded its surroundings (an earlier version wrote it)"
    elif report.differing:
        found = "; ".join(map(str, report.differing))
        yield f"other than in launch {launch.number}, which computed these steps: {found}"
    elif report.num_compared and not report.is_equal:
        yield (
            "nothing that is recorded is other than in the launch that computed these steps; what "
            "a function, a callback or another machine's model does by itself is not recorded"
        )
