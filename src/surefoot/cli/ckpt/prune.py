"""``surefoot ckpt prune``: delete the checkpoints of a run that its retention policy does not
keep.
"""

from __future__ import annotations

import dataclasses
import difflib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from ... import schema
from ...checkpoint.disk.commit import step_of
from ...checkpoint.disk.folder import open_checkpoint
from ...checkpoint.disk.retention import (
    RetentionDecision,
    RetentionPolicy,
    decide,
    drop_all,
    metrics_in,
    more_is_better,
    seconds,
)
from ...checkpoint.looking.listing import Line, list_run, state_of
from ...checkpoint.section import CheckpointSection
from ...errors import CheckpointError
from ...recipe.files import read_text
from ...recipe.yaml import parse
from ...storage import disk_usage, files
from ..table import FOLDER, JSON, as_dict, cell, console, in_bytes, mark, number, print_json, table
from ..table import time as local_time

RECIPE, LOCK = "recipe.yaml", ".lock"
_METRIC = "eval_loss"


@dataclass(frozen=True)
class PruneOptions:
    """The retention policy, and the metric of the best checkpoints."""

    rule: RetentionPolicy
    metric: str
    greater: bool
    resume: str = "auto"


@dataclass(frozen=True)
class Planned:
    """A complete checkpoint, its metric, and whether it is kept."""

    line: Line
    metric: float | None
    verdict: RetentionDecision


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
    wish = _wish(folder, {name: value for name, value in options.items() if value is not None})
    planned, freed = _plan(folder, wish)
    if dry_run:
        _tell(folder, planned, freed, wish.metric, as_json=as_json)
        return
    with _nobody_trains_in(folder):
        planned, freed = _plan(folder, wish)  # again, now that nobody can change it
        going = [item.line.path for item in planned if not item.verdict.stays]
        if not as_json:
            _tell(folder, planned, freed, wish.metric)
        if going and not yes:
            click.confirm(f"Remove {_count(len(going))}?", abort=True, err=True)
        drop_all(going)
        if as_json:
            _tell(folder, planned, freed, wish.metric, as_json=True, is_done=True)
        elif going:
            text = f"deleted {_count(len(going))}; freed {in_bytes(freed)}"
            console().print(mark("✓", "bold green", text))


def _wish(folder: Path, options: dict[str, Any]) -> PruneOptions:
    """The recipe's retention policy with the options on top."""
    numbers = {field.name for field in dataclasses.fields(RetentionPolicy)}
    section, train = CheckpointSection(keep=None), dict[str, Any]()
    if (folder / RECIPE).exists():
        section, train = _recipe(folder / RECIPE)
    elif not options.keys() & numbers:
        raise CheckpointError(
            f"{folder}: no {RECIPE}, so no retention policy; give one, for example --keep 3"
        )
    chosen = {name: value for name, value in options.items() if name in numbers}
    metric = options.get("metric") or train.get("metric_for_best_model") or _METRIC
    greater = options.get("greater")
    if greater is None and "metric" not in options:
        greater = train.get("greater_is_better")
    return PruneOptions(
        dataclasses.replace(section.rule(), **chosen),
        str(metric),
        more_is_better(str(metric)) if greater is None else bool(greater),
        section.resume,
    )


def _recipe(path: Path) -> tuple[CheckpointSection, dict[str, Any]]:
    """Two of its sections; the others may be of another version."""
    document = parse(read_text(path), str(path))
    sections = document.data if isinstance(document.data, dict) else {}

    def wrong(problems: Sequence[schema.Problem]) -> Exception:
        inside = [schema.Problem(("checkpoint", *p.path), p.message) for p in problems]
        return document.error(inside)

    section = schema.read(CheckpointSection, sections.get("checkpoint"), fail=wrong)
    train = sections.get("train")
    return section, train if isinstance(train, dict) else {}


@contextmanager
def _nobody_trains_in(folder: Path) -> Iterator[None]:
    """Hold the run's lock, as a training process does."""
    path = folder / LOCK
    with files.raising(CheckpointError, "cannot lock the run's folder"):
        lock = files.open_file(path, write=True) if files.exists(path) else files.create(path)
    with lock:
        try:
            lock.lock()
        except BlockingIOError:
            raise CheckpointError(
                f"{folder}: a process is training there, and deletes old checkpoints itself; "
                "stop it first, or add --dry-run"
            ) from None
        if saving := [line for line in list_run(folder) if line.is_being_written]:
            raise CheckpointError(
                f"{saving[0].path}: a checkpoint is still being saved, by the writer process of "
                "a run that ended; try again when it is done"
            )
        yield


def _plan(folder: Path, wish: PruneOptions) -> tuple[list[Planned], int]:
    """The decision for every complete Surefoot checkpoint, and the bytes that would be freed."""
    if step_of(folder.resolve()) >= 0:
        raise CheckpointError(f"{folder}: it is a checkpoint; name the folder of its run")
    lines = {
        step_of(line.path): line  # by name, as a run finds the newest
        for line in list_run(folder)
        if line.layout == "native" and line.problem is None and not line.is_being_written
    }
    if not lines:
        raise CheckpointError(f"{folder}: it contains no complete Surefoot checkpoint to prune")
    metrics = _metrics(list(lines.values()), wish)
    resume = Path(wish.resume).resolve()
    protected = [s for s, line in lines.items() if line.is_best or line.path.resolve() == resume]
    verdicts = decide(
        {step: seconds(line.created) for step, line in lines.items()},
        wish.rule,
        now=time.time(),
        metrics=metrics,
        greater=wish.greater,
        protected=protected,
    )
    planned = [
        Planned(lines[v.step], metrics.get(v.step), _named(lines[v.step], v)) for v in verdicts
    ]
    going = [item.line.path for item in planned if not item.verdict.stays]
    return planned, disk_usage.freed(
        [disk_usage.stored(path) for path in going if not path.is_symlink()]
    )


def _named(line: Line, verdict: RetentionDecision) -> RetentionDecision:
    """The same decision, with the reason why it is protected."""
    name = "best" if line.is_best else "checkpoint.resume names it"
    why = [name if reason == "protected" else reason for reason in verdict.why]
    return RetentionDecision(verdict.step, tuple(dict.fromkeys(why)))


def _metrics(lines: Sequence[Line], wish: PruneOptions) -> dict[int, float]:
    """The metric of every evaluated step, from the logs of all checkpoints; the latest has
    precedence.
    """
    history = [row for line in lines for row in state_of(open_checkpoint(line.path)).history]
    found = metrics_in(history, wish.metric)
    if not found and wish.rule.keep_best and history:
        known = sorted({str(key) for row in history if isinstance(row, dict) for key in row})
        near = difflib.get_close_matches(wish.metric, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise CheckpointError(f"--metric: {wish.metric!r} was never logged; {hint}")
    return found


def _tell(
    folder: Path,
    planned: list[Planned],
    freed: int,
    metric: str,
    *,
    as_json: bool = False,
    is_done: bool = False,
) -> None:
    going = [item for item in planned if not item.verdict.stays]
    if as_json:
        rows = [
            {**as_dict(item.line), "metric": item.metric, "stays": item.verdict.stays}
            | {"why": list(item.verdict.why)}
            for item in planned
        ]
        print_json({"checkpoints": rows, "freed_bytes": freed, "removed": is_done})
        return
    screen = console()
    screen.print(_table(planned, metric))
    if not going:
        screen.print(f"{folder}: nothing to delete", markup=False, soft_wrap=True)
        return
    apparent = sum(item.line.num_bytes or 0 for item in going)
    shared = (
        f" (of {in_bytes(apparent)}; the rest is still in use)" if freed < 0.99 * apparent else ""
    )
    text = f"{_count(len(going))} of {len(planned)} can be deleted; frees {in_bytes(freed)}{shared}"
    screen.print(text, style="bold", markup=False)


def _table(planned: list[Planned], metric: str) -> Table:
    has_metric = any(item.metric is not None for item in planned)
    name = metric.replace("_", " ")
    columns = ("checkpoint", "saved", "size", *((name,) if has_metric else ()), "", "why")
    made = table(*columns, numbers=("size", name))
    for item in planned:
        stays = item.verdict.stays
        made.add_row(
            cell(item.line.path.name),
            cell(local_time(item.line.created)),
            in_bytes(item.line.num_bytes),
            *([number(item.metric)] if has_metric else []),
            Text("keep" if stays else "delete", style="green" if stays else "red"),
            ", ".join(item.verdict.why),
            style="" if stays else "dim",
        )
    return made


def _count(number: int) -> str:
    return f"{number:,} checkpoint{'s' if number != 1 else ''}"
