"""``surefoot runs ls``: the table of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from ..table import JSON, cell, console, fitted, in_bytes, number, print_json
from .root import ROOT

_COLORS = {"running": "green", "complete": "", "failed": "red", "died": "red"}
_NUMBERS = ("step", "loss", "metric", "tokens/s", "size")
_OPTIONAL = ("tokens/s", "size", "metric")


@click.command()
@click.argument("root", default=".", type=ROOT)
@click.option(
    "--filter", "words", default="", help="Only runs that have all of these words, as 'died lora'."
)
@JSON
def ls(root: Path, words: str, *, as_json: bool) -> None:
    """List the runs below ROOT.

    The state of each comes from its lock and its record. A word of --filter is searched in names,
    states, models, stages and methods.
    """
    from ...board.board import Board
    from ...board.reports.runs import matches, table

    found = table(Board(root))
    rows = [row for row in found["runs"] if matches(row, words)]  # type: ignore[attr-defined]
    if as_json:
        print_json({**found, "runs": rows})
        return
    screen = console()
    if not rows:
        screen.print(cell(f"{found['root']}: no runs"))
        return
    columns = {name: cells for name, cells in _columns(rows).items() if any(cells)}
    screen.print(fitted(screen, columns, numbers=_NUMBERS, optional=_OPTIONAL))
    if found["is_cut"]:
        screen.print("there may be more runs: the search ended at its limit", style="yellow")


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Text]]:
    cells = {
        "step": [_step(row) for row in rows],
        "loss": [number(row["loss"]) for row in rows],
        "metric": [number(row["metric"]["value"]) for row in rows],
        "tokens/s": [number(row["speed"]) for row in rows],
        "size": [in_bytes(row["size"]) for row in rows],
    }
    return {
        "run": [cell(row["run"]) for row in rows],
        "state": [Text(row["state"], style=_COLORS.get(row["state"], "yellow")) for row in rows],
        **{name: [cell(text) for text in texts] for name, texts in cells.items()},
    }


def _step(row: Mapping[str, Any]) -> str:
    if row["step"] is None:
        return ""
    most = row["max_steps"]
    return f"{row['step']:,}" if most in (None, row["step"]) else f"{row['step']:,} / {most:,}"
