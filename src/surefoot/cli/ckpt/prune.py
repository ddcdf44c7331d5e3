"""``surefoot ckpt prune``: delete checkpoints that the retention policy does not keep."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from ...checkpoint.looking.listing import PrunePlan, plan_pruning, untrained
from ...recipe.run_recipe import prune_options
from ..table import FOLDER, JSON, as_dict, cell, console, in_bytes, mark, number, print_json, table
from ..table import time as local_time


@click.command()
@click.argument("folder", metavar="RUN", type=FOLDER)
@click.option("--keep", type=click.IntRange(1), help="Keep this many of the latest.")
@click.option("--keep-every", type=click.IntRange(1), help="Keep multiples of this step.")
@click.option("--keep-best", type=click.IntRange(1), help="Keep this many of the best.")
@click.option(
    "--keep-hours",
    type=click.FloatRange(0, min_open=True),
    help="Keep those saved within this many hours before the latest.",
)
@click.option("--metric", help="Metric of the best checkpoints, eval_loss for example.")
@click.option(
    "--greater/--smaller", default=None, help="Whether greater values of the metric are better."
)
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@click.option("--yes", is_flag=True, help="Delete without asking.")
@JSON
def prune(folder: Path, dry_run: bool, yes: bool, as_json: bool, **options: object) -> None:
    """Delete the checkpoints of RUN that its retention policy does not keep.

    The policy is section checkpoint of RUN's own recipe.yaml; an option replaces the setting of the
    same name. The latest valid checkpoint and the best are always kept, and damaged ones are
    ignored. Refused while a process trains in RUN.
    """
    given = {name: value for name, value in options.items() if value is not None}
    wanted = prune_options(folder, given)
    plan = plan_pruning(folder, wanted)
    if dry_run:
        _tell(folder, plan, wanted.metric, as_json=as_json)
        return
    with untrained(folder):
        plan = plan_pruning(folder, wanted)  # again, now that nobody can change it
        count = len(plan.removable)
        if not as_json:
            _tell(folder, plan, wanted.metric)
        if count and not yes:
            click.confirm(f"Remove {_count(count)}?", abort=True, err=True)
        plan.remove()
        if as_json:
            _tell(folder, plan, wanted.metric, as_json=True, is_done=True)
        elif count:
            text = f"deleted {_count(count)}; freed {in_bytes(plan.freed_bytes)}"
            console().print(mark("✓", "bold green", text))


def _tell(
    folder: Path, plan: PrunePlan, metric: str, *, as_json: bool = False, is_done: bool = False
) -> None:
    going, freed = plan.removable, plan.freed_bytes
    if as_json:
        rows = [
            {**as_dict(item.line), "metric": item.metric, "stays": item.verdict.stays}
            | {"why": list(item.verdict.why)}
            for item in plan.checkpoints
        ]
        print_json({"checkpoints": rows, "freed_bytes": freed, "removed": is_done})
        return
    screen = console()
    screen.print(_table(plan, metric))
    if not going:
        screen.print(f"{folder}: nothing to delete", markup=False, soft_wrap=True)
        return
    apparent = sum(item.line.num_bytes or 0 for item in going)
    shared = (
        f" (of {in_bytes(apparent)}; the rest is still in use)" if freed < 0.99 * apparent else ""
    )
    of = f"{_count(len(going))} of {len(plan.checkpoints)}"
    screen.print(
        f"{of} can be deleted; frees {in_bytes(freed)}{shared}", style="bold", markup=False
    )


def _table(plan: PrunePlan, metric: str) -> Table:
    has_metric = any(item.metric is not None for item in plan.checkpoints)
    name = metric.replace("_", " ")
    columns = ("checkpoint", "saved", "size", *((name,) if has_metric else ()), "", "why")
    made = table(*columns, numbers=("size", name))
    for item in plan.checkpoints:
        stays = item.verdict.stays
        made.add_row(
            cell(item.line.path.name),
            cell(local_time(item.line.created)),
            in_bytes(item.line.num_bytes),
            *([number(item.metric)] if has_metric else []),
            Text("keep" if stays else "delete", style="green" if stays else "red"),
            ", ".join(item.verdict.why),
            style="" if stays else "dim",
        )
    return made


def _count(number: int) -> str:
    return f"{number:,} checkpoint{'s' if number != 1 else ''}"
