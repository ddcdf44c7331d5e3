"""``surefoot replay``: compute steps of a run again, and compare them with what it has logged."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any

import click

from ..errors import RunError, counted
from ..storage.files import raising, write_new
from ..storage.remote import Address, default_cache, is_address
from ..terminal_text import visible
from .loading import loading, start_ranks
from .replay_text import lines_of, of_both, of_operations, of_rows

if TYPE_CHECKING:
    from ..parallel.section import ParallelSection
    from ..parallel.world import World
    from ..run.replay import ReplayReport, Watcher
    from ..run.surroundings import Launch

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
@click.option(
    "--without",
    multiple=True,
    metavar="ROW",
    help="Compute the steps without a row, too (FILE:LINE); may be given several times.",
)
@click.option(
    "--rows", "has_rows", is_flag=True, help="Show each row's share of the gradient of step N."
)
def replay(
    place: str,
    first: int | None,
    last: int | None,
    every: int | None,
    report: Path | None,
    scratch: Path | None,
    without: tuple[str, ...],
    **looks: Any,
) -> None:
    """Compute steps of RUN, the folder or URL of a run, again, and compare them with its log.

    \b
    surefoot replay runs/orders --step 45
    surefoot replay runs/orders --step 41 --to 60
    surefoot replay runs/orders --step 45 --rows
    surefoot replay runs/orders --step 45 --to 52 --without data/orders.jsonl:465
    surefoot replay runs/orders --every 100 --report replayed.json

    The steps are computed from the nearest checkpoint before N, or from the beginning, with the
    settings, threads and ranks of the launch that computed them. Every line of metrics.jsonl up to
    step M is compared, and each tensor of the last checkpoint up to M. RUN is only read, so it may
    still train. Exit code 0: all is equal to the bit; 1: something differs, or nothing could be
    compared; 2: the steps cannot be computed again.
    """
    for file, option in ((looks["trace"], "--trace"), (report, "--report")):
        if file is not None and (file.exists() or not file.absolute().parent.is_dir()):
            why = "is there already" if file.exists() else "is in no folder that there is"
            raise click.UsageError(f"{option} {file} {why}; name a new file")
    if (first is None) == (every is None):
        raise click.UsageError("name the steps: --step N with or without --to M, or --every K")
    if every is not None:
        if last is not None or without or any(looks.values()):
            raise click.UsageError(
                "--to, --rows, --without, --trace and --compare are of --step alone"
            )
        raise click.exceptions.Exit(_at_intervals(place, every, report, scratch))
    if report is not None:
        raise click.UsageError("--report is of --every, not of --step")
    assert first is not None
    last = first if last is None else last
    if last < first:
        raise click.UsageError(f"--to {last} is before --step {first}")
    if looks["has_rows"] and (looks["trace"] or looks["compare"]):
        raise click.UsageError("--rows computes more than the step has; trace it without")
    if without and any(looks.values()):
        raise click.UsageError("--without computes the steps twice; give it without other looks")
    run = local_run(place, first, last)
    with ranks_of(run, surrounded(run, last)) as (world, parallel):
        computing = _Computing(run, scratch, world, parallel)
        if without:
            is_equal = computing.both((first, last), list(dict.fromkeys(without)))
        else:
            is_equal = _look(computing, first, last, **looks)
    if not is_equal:
        raise click.exceptions.Exit(1)


@dataclass(frozen=True)
class _Computing:
    """Where steps of ``run`` are computed again, and by whom."""

    run: Path
    scratch: Path | None
    world: World
    parallel: ParallelSection

    def steps(self, first: int, last: int, watching: Sequence[Watcher] = ()) -> ReplayReport:
        """Compute the steps from ``first`` to ``last``. A signal ends the command."""
        from ..run.replay import ReplayPlan, compute

        plan = self.world.on_main(lambda: ReplayPlan.of(self.run, first, last))
        with self._folder() as (folder, world):
            result = compute(plan, folder, world, watching=watching)
            world.wait()
        if result.signal is not None:
            self.say(*lines_of(result))
            raise SystemExit(128 + result.signal)
        return result

    def both(self, steps: tuple[int, int], rows: Sequence[str]) -> bool:
        """Compute the first to the last of ``steps`` with and without ``rows``, and say what came
        of it; returns whether nothing differs from the log. A signal ends the command."""
        from ..run.counterfactual import compute_both

        with self._folder() as (folder, world):
            result = compute_both(self.run, steps, rows, folder, world)
            world.wait()
        if isinstance(result, Signals):
            raise SystemExit(128 + result)
        self.say(*lines_of(result.replay), *of_both(result))
        return not result.replay.gaps and not result.replay.odd_tensors

    @contextmanager
    def _folder(self) -> Iterator[tuple[Path, World]]:
        """A folder for what is computed, and the ranks that compute it, watched."""
        from ..parallel.watchdog import watched
        from ..run.replay import scratch_folder

        with (
            scratch_folder(self.run, self.scratch, self.world) as folder,
            watched(self.world, self.parallel, folder) as world,
        ):
            yield folder, world

    def say(self, *lines: str) -> None:
        """Print ``lines``, on one rank."""
        if self.world.is_main:
            click.echo(visible("\n".join(lines)))


def _look(
    computing: _Computing,
    first: int,
    last: int,
    *,
    trace: Path | None,
    compare: Path | None,
    has_rows: bool,
) -> bool:
    """Replay steps, watched as the options say; returns whether all that was compared is equal."""
    from ..run.row_gradients import RowGradients
    from ..run.surroundings import differences
    from ..run.trace import SavedTrace, Trace, TraceReport

    before = None if compare is None else SavedTrace.read(compare, first, last)
    rows = RowGradients(first)
    with closing(Trace(first)) as watch:
        wanted = ((watch, trace or compare), (rows, has_rows))
        watching = [watcher for watcher, is_wanted in wanted if is_wanted]
        result = computing.steps(first, last, watching)
    computing.say(*lines_of(result), *of_rows(first, rows.measured))
    if trace is not None and computing.world.is_main:
        watch.save(trace, result.surroundings)
        operations = counted(len(watch.operations), "operation")
        computing.say(f"{trace}: {operations}; compare them with --compare {trace}")
    if before is None:
        return result.is_equal
    compared = TraceReport.of(before.operations, watch.operations)
    computing.say(*of_operations(compared))
    if changes := differences(before.surroundings, result.surroundings):
        computing.say(f"other than in {compare}: {'; '.join(map(str, changes))}")
    return result.is_equal and compared.is_equal


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
        computing = _Computing(run, scratch, world, parallel)
        for step in steps:
            try:
                segments.append(_segment(step, computing.steps(step, step)))
            except RunError as error:  # such as of a launch on other ranks
                segments.append({"step": step, "equal": None, "said": [str(error)]})
            computing.say(*segments[-1]["said"])
        num_equal = sum(segment["equal"] is True for segment in segments)
        computing.say(f"{num_equal} of {counted(len(steps), 'step')} equal to the bit")
        if world.is_main and report is not None:
            facts = {"run": str(run.absolute()), "every": every, "segments": segments}
            with raising(RunError, f"--report {report}"):
                write_new(report, json.dumps(facts, indent=1).encode())
    return int(num_equal < len(steps))


def _segment(step: int, result: ReplayReport) -> dict[str, Any]:
    """What a report says of a step."""
    return {
        "step": step,
        "equal": result.is_equal,
        "computed_from": result.plan.start_step + 1,
        "equal_lines": result.num_equal,
        "equal_tensors": len(result.tensors or ()) - len(result.odd_tensors),
        "surroundings": result.surroundings,
        "said": list(lines_of(result)),
    }


def local_run(place: str, first: int, last: int) -> Path:
    """The folder of the run at ``place``; of one in a store, a copy in the cache of what the steps
    from ``first`` to ``last`` need. Raises ``RunError`` unless it is a run of Surefoot."""
    from ..recipe.files import RUN_RECIPE, is_checkpoint

    if is_address(place):
        from ..checkpoint.remote import stores

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
    start_ranks(parallel, ["surefoot.run.replay"])
    with loading():
        from ..parallel.world import joined

    with joined(parallel) as world:
        yield world, parallel
