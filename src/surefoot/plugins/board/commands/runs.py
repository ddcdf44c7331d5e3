"""``surefoot runs``: what the board shows of runs, on the terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from ....cli.table import JSON, cell, console, fitted, frame, in_bytes, number, print_json, table
from ....errors import RunError

if TYPE_CHECKING:
    from ..board import Board

ROOT = click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True)
_COLORS = {"running": "green", "complete": "", "failed": "red", "died": "red"}
_NUMBERS = ("step", "loss", "metric", "tokens/s", "size")
_OPTIONAL = ("tokens/s", "size", "metric")


@click.group()
def runs() -> None:
    """List runs, show one, and compare recipes."""


@runs.command()
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
    from ..board import Board
    from ..reports import matches
    from ..reports import table as all_runs

    found = all_runs(Board(root))
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


def _opened(run: Path) -> Board:
    """The board of a run alone. Raises ``RunError`` if it is none."""
    from ..board import Board
    from ..run_folders import is_run

    if not is_run(run):
        raise RunError(f"{run}: is not a run; surefoot runs ls {run} lists those below it")
    return Board(run)


@runs.command()
@click.argument("run", type=ROOT)
@JSON
def show(run: Path, *, as_json: bool) -> None:
    """Show the state of RUN with its evidence, its launches, and the names of its metrics.

    With --json, also its recipe and the end of its log.
    """
    from ..reports import details, log

    board = _opened(run)
    found: dict[str, Any] = details(board, ".")
    found["row"]["run"] = found["folder"]
    if as_json:
        print_json({**found, "log": log(board, ".")["text"]})
        return
    row = found["row"]
    facts = {
        "state": f"{row['state']} (evidence: {row['evidence']})",
        "error": (row["end"] or {}).get("error"),
        "step": row["step"],
        "of": row["max_steps"],
        "loss": number(row["loss"]),
        row["metric"]["name"]: number(row["metric"]["value"]),
        "size": in_bytes(row["size"]),
        "launches": len(found["launches"]),
        "metrics": ", ".join(found["metrics"]),
        "problem": found["recipe_problem"] or found["metrics_problem"],
    }
    shown = [(name, value) for name, value in facts.items() if value not in (None, "", [])]
    console().print(frame(cell(found["folder"]), shown))


@runs.command()
@click.argument("a", metavar="RUN_A", type=ROOT)
@click.argument("b", metavar="RUN_B", type=ROOT)
@JSON
def diff(a: Path, b: Path, *, as_json: bool) -> None:
    """Show the settings in which the recipes of two runs differ."""
    from ..reports import differences

    changes = differences(_opened(a).root, _opened(b).root)
    if as_json:
        print_json({"a": str(a), "b": str(b), "changes": changes})
        return
    made = table("setting", "a", "b")
    for one in changes:
        made.add_row(*(cell(text) for text in (one["path"], _json(one["old"]), _json(one["new"]))))
    console().print(made if changes else "both recipes are equal")


def _json(value: object) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)
