"""``surefoot replay``: compute steps of a run again, and compare them with what it has logged."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import RunError, counted
from ..storage.files import write_new
from ..storage.remote import Address, default_cache, is_address
from ..terminal_text import visible
from .loading import loading, start_ranks

if TYPE_CHECKING:
    from ..parallel.section import ParallelSection
    from ..parallel.world import World
    from ..run.replay import ReplayReport
    from ..run.surroundings import Launch
    from ..run.trace import TraceReport
    from ..training.callback import TrainerCallback

_SHOWN = 6  # figures and tensors that differ
_SECONDS = 60.0  # of failures in a row, before a store is given up


@click.command()
@click.argument("place", metavar="RUN")
@click.option("--step", "first", type=click.IntRange(1), metavar="N", help="The first step.")
@click.option(
    "--to", "last", type=click.IntRange(1), metavar="M", help="The last step; by default N."
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a new FILE with the operations of steps N to M, and hashes of their results.",
)
@click.option(
    "--compare",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Name the first operation whose bits are others than in a FILE of --trace.",
)
@click.option("--every", type=click.IntRange(1), metavar="K", help="Each step that K divides.")
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Of --every: write a new FILE (JSON) with what was equal.",
)
@click.option(
    "--scratch",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Where to work, if not beside RUN: as much room as a checkpoint takes.",
)
def replay(
    place: str,
    first: int | None,
    last: int | None,
    trace: Path | None,
    compare: Path | None,
    every: int | None,
    report: Path | None,
    scratch: Path | None,
) -> None:
    """Compute steps of RUN, the folder or URL of a run, again, and compare them with its log.

    \b
    surefoot replay runs/orders --step 45
    surefoot replay runs/orders --step 41 --to 60
    surefoot replay runs/orders --every 100 --report replayed.json

    The steps are computed from the nearest checkpoint before N, or from the beginning, with the
    settings, threads and ranks of the launch that computed them. Every line of metrics.jsonl up to
    step M is compared, and each tensor of the last checkpoint up to M. RUN is only read, so it may
    still train. Exit code 0: all is equal to the bit; 1: something differs, or nothing could be
    compared; 2: the steps cannot be computed again.
    """
    for file, option in ((trace, "--trace"), (report, "--report")):
        if file is not None and (file.exists() or not file.absolute().parent.is_dir()):
            why = "is there already" if file.exists() else "is in no folder that there is"
            raise click.UsageError(f"{option} {file} {why}; name a new file")
    if (first is None) == (every is None):
        raise click.UsageError("name the steps: --step N with or without --to M, or --every K")
    if every is not None:
        if last is not None or trace is not None or compare is not None:
            raise click.UsageError("--to, --trace and --compare are of --step, not of --every")
        raise click.exceptions.Exit(_at_intervals(place, every, report, scratch))
    if report is not None:
        raise click.UsageError("--report is of --every, not of --step")
    assert first is not None
    last = first if last is None else last
    if last < first:
        raise click.UsageError(f"--to {last} is before --step {first}")
    run = local_run(place, first, last)
    with ranks_of(run, surrounded(run, last)) as (world, parallel):
        from ..run.surroundings import differences
        from ..run.trace import SavedTrace, Trace

        before = None if compare is None else SavedTrace.read(compare, first, last)
        with closing(Trace(first)) as watch:
            watching = (watch,) if trace or compare else ()
            found = _replayed(run, first, last, scratch, world, parallel, watching)
    is_equal = found.is_equal
    if world.is_main:
        click.echo(visible("\n".join(lines_of(found))))
        if trace is not None and found.signal is None:
            watch.save(trace, found.surroundings)
            operations = counted(len(watch.operations), "operation")
            click.echo(visible(f"{trace}: {operations}; compare them with --compare {trace}"))
        if before is not None and found.signal is None:
            compared = before.compared(watch.operations)
            is_equal &= compared.is_equal
            click.echo(visible("\n".join(_of_operations(compared))))
            if changes := differences(before.surroundings, found.surroundings):
                click.echo(visible(f"other than in {compare}: {'; '.join(map(str, changes))}"))
    if found.signal is not None:
        raise SystemExit(128 + found.signal)
    if not is_equal:
        raise click.exceptions.Exit(1)


def _replayed(
    run: Path,
    first: int,
    last: int,
    scratch: Path | None,
    joined_world: World,
    parallel: ParallelSection,
    watching: Sequence[TrainerCallback] = (),
) -> ReplayReport:
    from ..parallel.watchdog import watched
    from ..run.replay import ReplayPlan, compute, scratch_folder

    plan = joined_world.on_main(lambda: ReplayPlan.of(run, first, last))
    with (
        scratch_folder(run, scratch, joined_world) as folder,
        watched(joined_world, parallel, folder) as world,
    ):
        found = compute(plan, folder, world, watching=watching)
        world.wait()
    return found


def _at_intervals(place: str, every: int, report: Path | None, scratch: Path | None) -> int:
    """Replay each step that ``every`` divides, and say and write what came of it; the exit code."""
    if is_address(place):
        raise click.UsageError(f"--every is of a folder; copy {place} here first")
    run = local_run(place, 1, 1)
    launch = surrounded(run, sys.maxsize)  # the last one
    with loading():
        from ..run.replay import last_step_of

    steps = range(every, last_step_of(run) + 1, every)
    if not steps:
        raise RunError(f"{run}: has not come to step {every} yet")
    segments = list[dict[str, Any]]()
    with ranks_of(run, launch) as (world, parallel):
        for step in steps:
            try:
                found = _replayed(run, step, step, scratch, world, parallel)
            except RunError as error:  # such as of a launch with other ranks
                segments.append({"step": step, "equal": None, "said": [str(error)]})
            else:
                if found.signal is not None:
                    raise SystemExit(128 + found.signal)
                segments.append(_segment(step, found))
            if world.is_main:
                click.echo(visible("\n".join(segments[-1]["said"])))
        num_equal = sum(segment["equal"] is True for segment in segments)
        if world.is_main:
            click.echo(f"{num_equal} of {counted(len(steps), 'step')} equal to the bit")
            if report is not None:
                facts = {"run": str(run.absolute()), "every": every, "segments": segments}
                write_new(report, json.dumps(facts, indent=1).encode())
    return int(num_equal < len(steps))


def _segment(step: int, found: ReplayReport) -> dict[str, Any]:
    """What a report says of a step."""
    return {
        "step": step,
        "equal": found.is_equal,
        "computed_from": found.plan.start_step + 1,
        "equal_lines": found.num_equal,
        "equal_tensors": len(found.tensors or ()) - len(found.odd_tensors),
        "surroundings": found.surroundings,
        "said": list(lines_of(found)),
    }


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


def _of_operations(report: TraceReport) -> Iterator[str]:
    """What two traces have in common, for people."""
    alike = counted(report.num_alike, "operation")
    if report.is_equal:
        yield f"{alike}: equal to the bit"
        return
    if report.parted is not None:
        before, now = (each or "none" for each in report.parted)
        yield f"the operations are others: first {before} then, {now} now"
    if report.first is None:
        yield f"{alike} in both: equal to the bit"
    else:
        number, operation = report.first
        yield f"{alike} in both, {report.num_differing:,} with other bits; the first is {operation}"
        yield f"  number {number:,}; those before it are equal to the bit"
