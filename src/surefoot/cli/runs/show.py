"""``surefoot runs show``: one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..table import JSON, cell, console, frame, in_bytes, number, print_json
from .root import ROOT, opened_run


@click.command()
@click.argument("run", type=ROOT)
@JSON
def show(run: Path, *, as_json: bool) -> None:
    """Show the state of RUN with its evidence, its launches, and the names of its metrics.

    With --json, also its recipe and the end of its log.
    """
    from ...board.reports.runs import details, log

    board = opened_run(run)
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
