"""``surefoot runs samples``: responses that a run has kept."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ...errors import RunError
from ..table import JSON, cell, console, print_json, table
from .root import ROOT, opened_run


@click.command()
@click.argument("run", type=ROOT)
@click.argument("file", required=False)
@JSON
def samples(run: Path, file: str | None, *, as_json: bool) -> None:
    """List the files of samples of RUN, or show the first rows of FILE, one of them.

    Rollouts are sampled in training; generations are answers to held-out prompts by
    `surefoot eval`.
    """
    from ...board.reports.runs import samples as rows_of
    from ...board.samples import sample_files

    board = opened_run(run)
    files = sample_files(board.root)
    if file is not None and file not in {one.name for one in files}:
        raise RunError(f"{run}: has no samples {file}; surefoot runs samples {run} lists them")
    if file is None:
        found: dict[str, Any] = {"files": [asdict(one) for one in files]}
    else:
        found = rows_of(board, ".", file)
    if as_json:
        print_json(found)
        return
    if file is None and not files:
        click.echo(f"{run}: has kept no samples")
        return
    columns = ("file", "kind", "step") if file is None else ("origin", "prompt", "answer")
    made = table(*columns)
    for row in found["files"] if file is None else found["rows"]:
        made.add_row(*(cell(_short(value)) for value in _cells(row, is_file=file is None)))
    console().print(made)
    if found.get("broken"):
        console().print(f"{found['broken']} lines cannot be read", style="yellow")


def _cells(row: dict[str, Any], *, is_file: bool) -> list[object]:
    if is_file:
        return [row["name"], row["kind"], "" if row["step"] is None else row["step"]]
    answer = row.get("answer")
    if answer is None:
        answer = "".join(str(one.get("text", "")) for one in row.get("tokens", []))
    return [row.get("origin", ""), row.get("prompt", ""), answer]


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 400 else f"{text[:399]}…"
