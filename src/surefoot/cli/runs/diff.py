"""``surefoot runs diff``: the settings in which two recipes differ."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..table import JSON, cell, console, print_json, table
from .root import ROOT, opened_run


@click.command()
@click.argument("a", metavar="RUN_A", type=ROOT)
@click.argument("b", metavar="RUN_B", type=ROOT)
@JSON
def diff(a: Path, b: Path, *, as_json: bool) -> None:
    """Show the settings in which the recipes of two runs differ."""
    from ...board.recipe_text import differences

    changes = differences(opened_run(a).root, opened_run(b).root)
    if as_json:
        print_json({"a": str(a), "b": str(b), "changes": changes})
        return
    made = table("setting", "a", "b")
    for one in changes:
        made.add_row(*(cell(text) for text in (one["path"], _json(one["old"]), _json(one["new"]))))
    console().print(made if changes else "both recipes are equal")


def _json(value: object) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)
