"""``surefoot ckpt``: what checkpoints there are, what is in one, and whether it is still whole.

Nothing here needs torch, so that ``ls`` answers at once.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from ..checkpoint.summary import Group, Line, Summary, list_run, summarise
from ..checkpoint.verify import Report, verify

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
_NUMBERS = ("step", "size", "loss", "tensors", "elements")  # columns of figures
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_LAYOUTS = {"native": "Surefoot", "huggingface": "Hugging Face", "peft": "PEFT adapter"}


@click.group()
def ckpt() -> None:
    """List, show and verify checkpoints."""


@ckpt.command()
@click.argument("folder", metavar="RUN", type=_FOLDER)
@_JSON
def ls(folder: Path, as_json: bool) -> None:
    """List the checkpoints of RUN, a run's folder, oldest first.

    Files are checked to be there at full length; `surefoot ckpt verify` checks every byte.
    """
    lines = list_run(folder)
    if as_json:
        _print_json([_as_json(line) for line in lines])
    elif not lines:
        click.echo(f"{folder}: no checkpoints")
    else:
        console = _console()
        console.print(_run_table(lines))
        for line in lines:
            if line.problem is not None:
                text = Text.assemble(("✗ ", "bold red"), f"{line.path.name}: {line.problem}")
                console.print(text, soft_wrap=True)


def _run_table(lines: list[Line]) -> Table:
    usable = [line for line in lines if line.problem is None and line.step is not None]
    newest = usable[-1] if usable else None
    columns: dict[str, list[str | Text]] = {
        "checkpoint": [line.path.name for line in lines],
        "step": ["" if line.step is None else f"{line.step:,}" for line in lines],
        "saved": [_time(line.created) for line in lines],
        "size": [_size(line.num_bytes) for line in lines],
        "kind": [line.kind or "" for line in lines],
        "loss": ["" if line.loss is None else f"{line.loss:.4g}" for line in lines],
        "state": [_state(line, newest) for line in lines],
    }
    told = {name: cells for name, cells in columns.items() if any(cells)}
    table = _table(*told)
    for line, row in zip(lines, zip(*told.values(), strict=True), strict=True):
        table.add_row(*row, style="bold" if line is newest else "")
    return table


def _state(line: Line, newest: Line | None) -> Text:
    if line.is_being_written:
        return Text("being saved", style="yellow")
    if line.problem is not None:
        return Text("damaged" if line.step is not None else "leftover", style="red")
    words = [word for word, holds in (("newest", line is newest), ("best", line.is_best)) if holds]
    return Text(", ".join(words) or "complete", style="green")


@ckpt.command()
@click.argument("checkpoint", metavar="CHECKPOINT", type=_FOLDER)
@click.option("--tensors", is_flag=True, help="List every tensor.")
@_JSON
def show(checkpoint: Path, tensors: bool, as_json: bool) -> None:
    """Show what is in CHECKPOINT: one of ours, a Hugging Face model or a PEFT adapter."""
    summary = summarise(checkpoint)
    if as_json:
        _print_json(_as_json(summary))
        return
    console = _console()
    console.print(_facts(summary))
    console.print(_groups_table(summary.groups))
    if summary.states:
        console.print(_pairs("states", summary.states.items()))
    console.print(_pairs("files", ((name, _size(size)) for name, size in summary.files.items())))
    if tensors:
        console.print(_tensors_table(summary.groups))


def _facts(summary: Summary) -> Panel:
    grid = Table.grid(padding=(0, 2))
    total = sum(group.num_bytes for group in summary.groups)
    for name, value in {"layout": _LAYOUTS[summary.layout], **summary.facts}.items():
        grid.add_row(Text(name, style="dim"), _when(value) if name == "saved" else value)
    grid.add_row(Text("tensors", style="dim"), _size(total))
    return Panel(
        grid, title=str(summary.path), title_align="left", border_style="dim", expand=False
    )


def _groups_table(groups: Iterable[Group]) -> Table:
    table = _table("", "tensors", "elements", "size", "types")
    for group in groups:
        types = ", ".join(f"{name} ({count:,})" for name, count in group.dtypes.items())
        table.add_row(
            group.role,
            f"{len(group.tensors):,}",
            f"{group.num_elements:,}",
            _size(group.num_bytes),
            types,
        )
    return table


def _tensors_table(groups: Iterable[Group]) -> Table:
    table = _table("tensor", "type", "shape", "size", "file")
    for group in groups:
        for tensor in group.tensors:
            shape = " × ".join(map(str, tensor.shape)) or "scalar"
            table.add_row(tensor.name, tensor.dtype, shape, _size(tensor.num_bytes), tensor.file)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        is_last = name == columns[-1]
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=not is_last)
    return table


def _pairs(title: str, pairs: Iterable[tuple[str, str]]) -> Table:
    table = _table(title, "")
    for name, value in pairs:
        table.add_row(name, Text(value, style="dim"))
    return table


@ckpt.command("verify")
@click.argument("checkpoint", metavar="CHECKPOINT", type=_FOLDER)
@click.option(
    "--full/--quick",
    default=True,
    help="Check every byte (default), or lengths, headers and small files only.",
)
@_JSON
def verify_command(checkpoint: Path, full: bool, as_json: bool) -> None:
    """Check that CHECKPOINT is what was saved. The exit code is 1 if it is not."""
    began = time.perf_counter()
    report = _verify(checkpoint, full)
    if as_json:
        _print_json({**_as_json(report), "ok": report.ok})
    else:
        _print_report(report, time.perf_counter() - began)
    if not report.ok:
        raise click.exceptions.Exit(1)


def _verify(checkpoint: Path, full: bool) -> Report:
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=_total(checkpoint) if full else 0)
        return verify(checkpoint, full=full, progress=lambda count: bar.advance(task, count))


def _total(checkpoint: Path) -> int | None:
    """Bytes to hash; None if the folder does not even say."""
    found = list_run(checkpoint)
    return found[0].num_bytes if len(found) == 1 else None


def _print_report(report: Report, seconds: float) -> None:
    console = _console()
    for problem in report.problems:
        console.print(Text.assemble(("✗ ", "bold red"), problem), soft_wrap=True)
    for note in report.notes:
        console.print(Text.assemble(("· ", "dim"), note), soft_wrap=True, style="dim")
    if report.ok:
        text = f"{report.folder}: whole ({report.checked}, {seconds:.1f} s)"
        console.print(Text.assemble(("✓ ", "bold green"), text), soft_wrap=True)


def _console() -> Console:
    """The terminal as it is; a file or a pipe gets whole lines, to search and cut."""
    console = Console()
    return console if console.is_terminal else Console(width=240)


def _size(num_bytes: int | None) -> str:
    """Three digits and a decimal unit, as disks are sold and file managers count."""
    if num_bytes is None:
        return ""
    value, unit = float(num_bytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}"


def _when(created: str | None) -> str:
    """Local date and time, and how long ago; the text itself if it is no time."""
    text = _time(created)
    if text == (created or ""):
        return text
    seconds = max((datetime.now(UTC) - datetime.fromisoformat(created or "")).total_seconds(), 0)
    for limit, unit, length in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{text} ({seconds / length:.0f} {unit} ago)"
    return f"{text} ({seconds / 86400:.0f} days ago)"


def _time(created: str | None) -> str:
    """Local date and time; the text itself if it is no time."""
    try:
        return f"{datetime.fromisoformat(created or '').astimezone():%Y-%m-%d %H:%M}"
    except ValueError:
        return created or ""


def _as_json(value: object) -> dict[str, object]:
    assert dataclasses.is_dataclass(value)
    assert not isinstance(value, type)
    return dataclasses.asdict(value)


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, default=str))
