"""``surefoot rows``: which rows of a run are the worst, and which are those of a step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ..errors import counted
from ..terminal_text import one_line, visible
from .loading import loading, resolved_recipe
from .replay import local_run

if TYPE_CHECKING:
    from ..use.row_metrics import RowMetric, RunRows


@click.command()
@click.argument("place", metavar="RUN")
@click.option("--step", type=click.IntRange(1), metavar="N", help="The rows of this step.")
@click.option("-n", "count", default=10, type=click.IntRange(1), help="Rows to show of each kind.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def rows(place: str, step: int | None, count: int, *, as_json: bool) -> None:
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
    recipe = resolved_recipe(run, ())
    with loading():
        from ..run.parts import RunParts
        from ..use.row_metrics import RunRows
    found = RunRows.of(run, RunParts.unopened(recipe))
    stuck = found.stuck().tolist()
    if as_json:
        shown = found.of_step(step) if step else found.worst(count)
        content = {"metric": found.metric, "rows": [_strict(row) for row in shown]}
        content |= {} if step else {"not_improved": stuck}
        click.echo(visible(json.dumps(content, ensure_ascii=False, indent=2)))
        return
    lines = _of_step(found, step, count) if step else _of_run(found, stuck, count)
    for line in lines:
        click.echo(one_line(line))


def _of_run(found: RunRows, stuck: Sequence[int], count: int) -> Iterator[str]:
    epochs, items = found.table.shape
    total = f"{counted(items, 'row')} in {counted(epochs, 'epoch')}"
    yield f"{found.run}: {total}; of each the {found.metric}"
    yield "furthest from the rows around them:"
    yield from _shown(found, found.worst(count))
    if epochs > 1:
        yield f"not improved since the first epoch: {counted(len(stuck), 'row')}"
        yield from _shown(found, found.described(stuck[:count]))
    spikes = found.spikes(count)
    yield f"steps with a loss far above that of those around them: {len(spikes) or 'none'}"
    for step, loss, around in spikes:
        yield f"  step {step}: {loss:.4g}, {around:.4g} around it: add --step {step}"


def _of_step(found: RunRows, step: int, count: int) -> Iterator[str]:
    metrics, found_rows = found.steps[step - 1 : step], found.of_step(step)
    loss, norm = (float(metrics[0][name]) for name in ("loss", "grad_norm"))
    weight = float(metrics[0]["weight"])
    mean = _number(loss / weight) if weight else "none"
    yield f"step {step}: loss {mean} = {loss:.6g} / {weight:g}, grad_norm {norm:.6g}"
    yield f"{counted(len(found_rows), 'row')}, the worst first; of each the {found.metric}"
    yield from _shown(found, found_rows[:count])
    if len(found_rows) > count:
        yield f"  and {len(found_rows) - count} more: -n {len(found_rows)} shows them"


def _shown(found: RunRows, metrics: Sequence[RowMetric]) -> Iterator[str]:
    for row in metrics:
        values = ", ".join(map(_number, row.values))
        steps = ", ".join(map(str, row.steps))
        yield f"  {row.place}: {found.metric} {values} (step {steps})"
        yield f"    {row.text}"


def _number(value: float) -> str:
    return "not trained" if math.isnan(value) else f"{value:.4g}"


def _strict(row: RowMetric) -> dict[str, object]:
    values = [value if math.isfinite(value) else str(value) for value in row.values]
    return {**asdict(row), "values": values}
