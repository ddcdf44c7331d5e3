"""``surefoot ckpt verify``: check a checkpoint against its manifest."""

from __future__ import annotations

import time
from pathlib import Path

import click
from rich.text import Text

from ...checkpoint.looking.listing import list_run
from ...checkpoint.verification import Report, verify
from ...storage.address import Address
from ..table import JSON, as_dict, cell, console, mark, print_json, reading
from .checkpoint_path import PLACE


@click.command("verify")
@click.argument("checkpoint", metavar="CHECKPOINT", type=PLACE)
@click.option(
    "--full/--quick",
    default=True,
    help="Check every byte (default), or lengths, headers and small files only.",
)
@JSON
def verify_command(checkpoint: Path | Address, full: bool, as_json: bool) -> None:
    """Verify CHECKPOINT, a folder or a URL, against its manifest. The exit code is 1 if it
    fails.
    """
    began = time.perf_counter()
    if isinstance(checkpoint, Address):
        from ...checkpoint.remote import stores

        report = stores().verify(checkpoint, full=full)
    else:
        with reading("verifying", _total(checkpoint) if full else 0) as advance:
            report = verify(checkpoint, full=full, progress=advance)
    if as_json:
        print_json({**as_dict(report), "ok": report.ok})
    else:
        _print(report, time.perf_counter() - began)
    if not report.ok:
        raise click.exceptions.Exit(1)


def _total(checkpoint: Path) -> int | None:
    """Bytes to hash; None if the folder does not say."""
    found = list_run(checkpoint)
    return found[0].num_bytes if len(found) == 1 else None


def _print(report: Report, seconds: float) -> None:
    screen = console()
    for problem in report.problems:
        screen.print(mark("✗", "bold red", problem), soft_wrap=True)
    for note in report.notes:
        screen.print(Text.assemble(("· ", "dim"), cell(note)), soft_wrap=True, style="dim")
    if report.ok:
        text = f"{report.folder}: verified ({report.checked}, {seconds:.1f} s)"
        screen.print(mark("✓", "bold green", text), soft_wrap=True)
