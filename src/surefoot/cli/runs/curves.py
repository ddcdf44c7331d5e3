"""``surefoot runs curves``: metrics of a run by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ...errors import RunError
from ..table import JSON, cell, console, number, print_json, table
from .root import ROOT, opened_run


@click.command()
@click.argument("run", type=ROOT)
@click.option("--names", default="loss", show_default=True, help="Metrics, separated by commas.")
@click.option(
    "--points",
    default=40,
    show_default=True,
    type=click.IntRange(2, 20_000),
    help="About how many values of each; the smallest and largest of each interval are kept.",
)
@click.option(
    "--smooth",
    default=0,
    type=click.IntRange(0, 10_000),
    help="Also the means over this many logs before and after each value.",
)
@JSON
def curves(run: Path, names: str, points: int, smooth: int, *, as_json: bool) -> None:
    """Print metrics of RUN by step, as the board draws them. `surefoot runs show` has their names.

    Memory and time lost to saves are peak_memory and save_blocking_seconds.
    """
    from ...board.reports.runs import series

    wanted = [name.strip() for name in names.split(",") if name.strip()]
    found: dict[str, Any] = series(opened_run(run), ".", wanted, points=points, smooth=smooth)
    missing = [name for name in wanted if name not in found["series"]]
    if missing:
        raise RunError(f"{run}: has no metric {', '.join(missing)}; see surefoot runs show {run}")
    if as_json:
        print_json(found)
        return
    made = table("metric", "step", "value", numbers=("step", "value"))
    for name, one in found["series"].items():
        for said, curve in ((name, one), (f"{name}, mean", one.get("smooth", {"steps": []}))):
            for step, value in zip(curve["steps"], curve.get("values", ()), strict=True):
                shown = "not finite" if value is None else number(value)
                made.add_row(cell(said), f"{step:,.0f}", shown)
    console().print(made)
    if found["problem"]:
        console().print(cell(f"metrics.jsonl: {found['problem']}"), style="yellow")
