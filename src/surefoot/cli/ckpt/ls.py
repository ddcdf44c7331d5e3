"""``surefoot ckpt ls``: the checkpoints of a run, one per line."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...checkpoint.layouts import LAYOUTS
from ...checkpoint.looking.listing import CheckpointLine, list_run, verified
from ...storage.address import Address
from ..table import (
    JSON,
    as_dict,
    cell,
    console,
    fitted,
    in_bytes,
    mark,
    number,
    print_json,
    reading,
    time,
)
from .checkpoint_path import PLACE

_NUMBERS = ("step", "size", "on disk", "loss", "eval loss", "parent")
_OPTIONAL = ("parent", "kind", "layout", "step", "on disk")  # goes where there is no room
_SHARED = 0.99  # below this share of a checkpoint's size, it shares files with older ones


@click.command()
@click.argument("folder", metavar="RUN", type=PLACE)
@click.option("--verify", is_flag=True, help="Verify every byte of each checkpoint.")
@JSON
def ls(folder: Path | Address, verify: bool, as_json: bool) -> None:
    """List the checkpoints of RUN, a run's folder or its URL, oldest first.

    RUN may also be a folder of the Hugging Face Trainer or MindSpore. All files must exist at full
    length. Loss is the last that was logged, eval loss that of the same step. If checkpoints share
    files, a column "on disk" shows what each adds to the older ones. The exit code is 1 if --verify
    finds a damaged one.
    """
    if isinstance(folder, Address):
        from ...checkpoint.remote import stores

        lines = stores().lines(folder, verified=verify)
    else:
        lines = list_run(folder)
        if verify:
            with reading("verifying", sum(line.num_bytes or 0 for line in lines)) as advance:
                lines = [verified(line, advance) for line in lines]
    if as_json:
        print_json([as_dict(line) for line in lines])
    elif not lines:
        click.echo(f"{folder}: no checkpoints")
    else:
        _print(lines)
    if verify and any(line.step is not None and line.problem is not None for line in lines):
        raise click.exceptions.Exit(1)


def _print(lines: list[CheckpointLine]) -> None:
    screen = console()
    screen.print(_table(lines, screen))
    for line in lines:
        if line.problem is not None:
            screen.print(mark("✗", "bold red", f"{line.path.name}: {line.problem}"), soft_wrap=True)


def _table(lines: list[CheckpointLine], screen: Console) -> Table:
    usable = [line for line in lines if line.problem is None and line.step is not None]
    newest = usable[-1] if usable else None
    columns = {name: cells for name, cells in _columns(lines, newest).items() if any(cells)}
    styles = ["bold" if line is newest else "" for line in lines]
    return fitted(screen, columns, numbers=_NUMBERS, optional=_OPTIONAL, styles=styles)


def _columns(lines: list[CheckpointLine], newest: CheckpointLine | None) -> dict[str, list[Text]]:
    shares = any(_shares(line) for line in lines)
    cells = {
        "checkpoint": [line.path.name for line in lines],
        "step": ["" if line.step is None else f"{line.step:,}" for line in lines],
        "saved": [time(line.created) for line in lines],
        "size": [in_bytes(line.num_bytes) for line in lines],
        "on disk": [in_bytes(line.disk_bytes) if shares and line.step else "" for line in lines],
        "kind": [line.kind or "" for line in lines],
        "layout": [_written_by(line.layout) for line in lines],
        "loss": [number(line.loss) for line in lines],
        "eval loss": [number(line.eval_loss) for line in lines],
        "parent": [(line.parent or "").removeprefix("checkpoint-") for line in lines],
    }
    found = {name: [cell(text) for text in texts] for name, texts in cells.items()}
    return found | {"state": [_state(line, newest) for line in lines]}


def _written_by(layout: str | None) -> str:
    """Who writes runs of this layout, if not we."""
    return "" if layout is None else LAYOUTS[layout].written_by


def _shares(line: CheckpointLine) -> bool:
    known = line.num_bytes is not None and line.disk_bytes is not None
    return known and (line.disk_bytes or 0) < _SHARED * (line.num_bytes or 0)


def _state(line: CheckpointLine, newest: CheckpointLine | None) -> Text:
    if line.is_being_written:
        return Text("being saved", style="yellow")
    if line.problem is not None:
        return Text("damaged" if line.step is not None else "leftover", style="red")
    words = {
        "latest": line is newest,
        "best": line.is_best,
        "verified": line.verified == "every byte",
        "no hashes": line.verified == "structure",
    }
    said = ", ".join(word for word, holds in words.items() if holds)
    return Text(said or "complete", style="green")
