"""``surefoot ckpt prune``: delete checkpoints that the retention policy does not keep."""

from __future__ import annotations

import time
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from ...checkpoint.disk.commit import step_of
from ...checkpoint.disk.retention import pin
from ...checkpoint.layouts.layout import Reading
from ...checkpoint.looking.listing import PrunePlan, list_run, plan_pruning, untrained
from ...checkpoint.verification import Report, verify
from ...errors import CheckpointError
from ...recipe.run_recipe import prune_options
from ...storage.remote import Address
from ...terminal_text import in_bytes
from ..table import (
    FOLDER,
    JSON,
    PLACE,
    as_dict,
    cell,
    console,
    mark,
    number,
    print_json,
    reading,
    table,
)
from ..table import time as local_time
from ..targets import ReadingCommand


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
    explicit_options = {name: value for name, value in options.items() if value is not None}
    policy = prune_options(folder, explicit_options)
    plan = plan_pruning(folder, policy)
    if dry_run:
        _tell(folder, plan, policy.metric, as_json=as_json)
        return
    with untrained(folder):
        plan = plan_pruning(folder, policy)  # again, now that nobody can change it
        count = len(plan.removable)
        if not as_json:
            _tell(folder, plan, policy.metric)
        if count and not yes:
            click.confirm(f"Remove {_count(count)}?", abort=True, err=True)
        plan.remove()
        if as_json:
            _tell(folder, plan, policy.metric, as_json=True, is_done=True)
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
        screen.print(f"{folder}: nothing to delete", soft_wrap=True)
        return
    apparent = sum(item.line.num_bytes or 0 for item in going)
    shared = (
        f" (of {in_bytes(apparent)}; the rest is still in use)" if freed < 0.99 * apparent else ""
    )
    of = f"{_count(len(going))} of {len(plan.checkpoints)}"
    screen.print(f"{of} can be deleted; frees {in_bytes(freed)}{shared}", style="bold")


def _table(plan: PrunePlan, metric: str) -> Table:
    has_metric = any(item.metric is not None for item in plan.checkpoints)
    name = metric.replace("_", " ")
    columns = ("checkpoint", "saved", "size", *((name,) if has_metric else ()), "", "why")
    rich_table = table(*columns, numbers=("size", name))
    for item in plan.checkpoints:
        stays = item.verdict.stays
        rich_table.add_row(
            cell(item.line.path.name),
            cell(local_time(item.line.created)),
            in_bytes(item.line.num_bytes),
            *([number(item.metric)] if has_metric else []),
            Text("keep" if stays else "delete", style="green" if stays else "red"),
            ", ".join(item.verdict.why),
            style="" if stays else "dim",
        )
    return rich_table


def _count(number: int) -> str:
    return f"{number:,} checkpoint{'s' if number != 1 else ''}"


@click.command("verify", cls=ReadingCommand)
@click.argument("checkpoint", metavar="CHECKPOINT", type=PLACE)
@click.option(
    "--full/--quick",
    default=True,
    help="Check every byte (default), or lengths, headers and small files only.",
)
@JSON
def verify_command(checkpoint: Path | Address, full: bool, as_json: bool, read_as: Reading) -> None:
    """Verify CHECKPOINT, a folder or a URL, against its manifest. The exit code is 1 if it
    fails.
    """
    began = time.perf_counter()
    if isinstance(checkpoint, Address):
        from ...checkpoint.remote import stores

        report = stores().verify(checkpoint, full=full)
    else:
        with reading("verifying", _total(checkpoint) if full else 0) as advance:
            report = verify(checkpoint, full=full, progress=advance, reading=read_as)
    if as_json:
        print_json({**as_dict(report), "ok": report.ok})
    else:
        _print(report, time.perf_counter() - began)
    if not report.ok:
        raise click.exceptions.Exit(1)


def _total(checkpoint: Path) -> int | None:
    """Bytes to hash; None if the folder does not say."""
    lines = list_run(checkpoint)
    return lines[0].num_bytes if len(lines) == 1 else None


def _print(report: Report, seconds: float) -> None:
    screen = console()
    for problem in report.problems:
        screen.print(mark("✗", "bold red", problem), soft_wrap=True)
    for note in report.notes:
        screen.print(Text.assemble(("· ", "dim"), cell(note)), soft_wrap=True, style="dim")
    if report.ok:
        text = f"{report.folder}: verified ({report.checked}, {seconds:.1f} s)"
        screen.print(mark("✓", "bold green", text), soft_wrap=True)


@click.command("pin")
@click.argument("checkpoint", metavar="CHECKPOINT", type=FOLDER)
@click.option("--remove", is_flag=True, help="Pin it no longer.")
@JSON
def pin_command(checkpoint: Path, remove: bool, as_json: bool) -> None:
    """Keep CHECKPOINT, a folder such as RUN/checkpoint-400, whatever the retention policy says.

    The steps are in RUN/pinned.json. Training and `surefoot ckpt prune` do not delete them.
    """
    folder = checkpoint.absolute()
    if step_of(folder) < 0:
        raise CheckpointError(f"{checkpoint}: expected a checkpoint such as RUN/checkpoint-400")
    steps = sorted(pin(folder.parent, step_of(folder), is_pinned=not remove))
    if as_json:
        print_json({"pinned": steps})
    else:
        click.echo(f"pinned: {', '.join(map(str, steps)) or 'none'}")
