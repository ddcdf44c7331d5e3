"""``surefoot rows``: which rows of a run are the worst, and which are those of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from ..errors import counted
from ..terminal_text import one_line
from .loading import loading, resolved_recipe
from .replay import local_run

if TYPE_CHECKING:
    from ..use.row_metrics import RowMetric, RunRows


@click.command()
@click.argument("place", metavar="RUN")
@click.option("--step", type=click.IntRange(1), metavar="N", help="The rows of this step.")
@click.option("-n", "count", default=10, type=click.IntRange(1), help="Rows to show of each kind.")
def rows(place: str, step: int | None, count: int) -> None:
    """Show the worst rows of RUN, the folder of a run, by what training has measured of each.

    \b
    surefoot rows runs/orders
    surefoot rows runs/orders --step 45

    A row has one number in each epoch: the mean loss of its trained tokens; of a pair, the margin
    between its responses; of a prompt, the mean reward of the sampled ones. Listed are the rows
    that are furthest from those that were trained about when they were, rows that no later epoch
    has improved, and steps whose loss is far above that of the steps around them. What is trained
    of a row stands in [[ ]].
    """
    run = local_run(place, 1, 1)
    with loading():
        from ..training.callbacks.step_files import recorded
    recorded(run)  # or it is said before its recipe is read, whose data may be gone
    recipe = resolved_recipe(run, ())
    with loading():
        from ..run.parts import RunParts
        from ..use.row_metrics import RunRows
    run_rows = RunRows.of(run, RunParts.unopened(recipe))
    lines = _of_step(run_rows, step, count) if step else _of_run(place, run_rows, count)
    for line in lines:
        click.echo(one_line(line))


def _of_run(place: str, run_rows: RunRows, count: int) -> Iterator[str]:
    epochs, items = run_rows.table.shape
    total = f"{counted(items, 'row')} in {counted(epochs, 'epoch')}"
    yield f"{place}: {total}; of each the {run_rows.metric}"
    yield "furthest from the rows around them:"
    yield from _shown(run_rows, run_rows.worst(count))
    if epochs > 1:
        stuck = run_rows.stuck().tolist()
        yield f"not improved since the first epoch: {counted(len(stuck), 'row')}"
        yield from _shown(run_rows, run_rows.described(stuck[:count]))
    spikes = run_rows.spikes(count)
    yield f"steps with a loss far above that of those around them: {len(spikes) or 'none'}"
    for step, loss, around in spikes:
        yield f"  step {step}: {loss:.4g}, {around:.4g} around it: add --step {step}"


def _of_step(run_rows: RunRows, step: int, count: int) -> Iterator[str]:
    metrics, step_rows = run_rows.steps[step - 1 : step], run_rows.of_step(step)
    loss, norm = (float(metrics[0][name]) for name in ("loss", "grad_norm"))
    weight = float(metrics[0]["weight"])
    mean = _number(loss / weight) if weight else "none"
    yield f"step {step}: loss {mean} = {loss:.6g} / {weight:g}, grad_norm {norm:.6g}"
    yield f"{counted(len(step_rows), 'row')}, the worst first; of each the {run_rows.metric}"
    yield from _shown(run_rows, step_rows[:count])
    if len(step_rows) > count:
        yield f"  and {len(step_rows) - count} more: -n {len(step_rows)} shows them"


def _shown(run_rows: RunRows, metrics: Sequence[RowMetric]) -> Iterator[str]:
    for row in metrics:
        values = ", ".join(map(_number, row.values))
        steps = ", ".join(map(str, row.steps))
        yield f"  {row.place}: {run_rows.metric} {values} (step {steps})"
        yield f"    {row.text}"


def _number(value: float) -> str:
    return "not trained" if math.isnan(value) else f"{value:.4g}"
