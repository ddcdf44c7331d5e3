"""``surefoot watch``: states, figures and curves of runs in the terminal.

States and figures are the board's. A curve is drawn in dots of Braille, eight in a character, or by
one mark in each where there is no Unicode; of several curves in one character the last one gives
the color.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ....checkpoint.disk.commit import committed, step_of
from ....errors import RunError, SurefootError, counted
from ....storage.address import Address, default_cache, is_address
from ....terminal_text import duration, one_line
from ....training.callbacks.launches import NAME as LAUNCHES
from ..curves import Curve, thinned
from ..metrics import MetricsFile
from ..run_folders import METRICS, find_runs, is_run
from ..run_state import parsed, tail
from ..run_summary import Summaries, changed, figure, last_rows

DEFAULT = ("loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second")
COLORS = ("cyan", "yellow", "magenta", "green", "red", "blue", "bright_cyan", "white")
MARKS = "*+ox#@%&"  # of each curve, where there is no Unicode
STATES = {"running": "green", "complete": "bold", "stopped": "yellow"}
STATES |= dict.fromkeys(("failed", "died", "gone"), "bold red")
EVIDENCE = {  # keys of RunState.evidence in words
    "lock": "a process holds its lock",
    "process": "its process is alive",
    "starting": "its process has not begun to train",
    "not_begun": "its process ended before it began to train",
    "no_locks": "the file system has no locks, and the process is on another machine",
    "no_process": "its process is gone",
    "end": "it has recorded its end",
    "no_end": "no process holds its lock, and it has recorded no end",
    "no_record": "it kept no record",
}
FORMS = {"loss": "loss {:.4f}", "eval_loss": "eval_loss {:.4f}", "speed": "{:,.0f} tok/s"}
FORMS |= {"learning_rate": "learning_rate {:.3g}", "grad_norm": "grad_norm {:.3g}"}
_OVER = 2  # looks at runs that have ended, for what was just being written
_POINTS = 2000  # of a curve
_TAIL = 1 << 14  # bytes of launches.jsonl with the last record of memory
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of Braille, by row and column
_BLANK = 0x2800
_LEAST_WIDTH, _LEAST_HEIGHT, _MOST_HEIGHT = 38, 6, 18  # of a picture, with its frame
Row = Mapping[str, Any]
Points = Sequence[tuple[float, float]]


class WatchedRun:
    """The files of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics = MetricsFile(folder / METRICS)
        self.summaries = Summaries(folder.parent)

    def look(self) -> dict[str, Any]:
        """The row of the board's table with the last figures and checkpoints. A run that vanishes
        is gone."""
        if not self.folder.exists():
            return {"name": self.folder.name, "state": "gone"}
        self.metrics.refresh()
        row = self.summaries.of(self.folder)
        train, evaluation, _ = last_rows(self.folder)
        row |= {"because": _because(row), "metrics_problem": self.metrics.note()}
        for name in ("learning_rate", "grad_norm", "eval_loss"):
            row[name] = figure({**train, **evaluation}.get(name))
        records = (parsed(line) or {} for line in tail(self.folder / LAUNCHES, _TAIL).splitlines())
        memory = [one["peak_memory"] for one in records if isinstance(one.get("peak_memory"), int)]
        row["peak_memory"] = memory[-1] if memory else None
        with contextlib.suppress(SurefootError):  # the folder vanished
            row["checkpoints"] = [step_of(path) for path in committed(self.folder)]
        return row

    def curve(self, name: str) -> Curve | None:
        """The curve of a metric, if there is one."""
        column = self.metrics.columns.get(name)
        return None if column is None else thinned(column, _POINTS)


@click.command()
@click.argument("runs", nargs=-1, required=True)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    help="A curve to show, such as reward; repeat it for more. Without it: loss and eval_loss, "
    "learning_rate, grad_norm, tokens_per_second.",
)
@click.option("--once", is_flag=True, help="Print the state of now, and end.")
@click.option("--plain", is_flag=True, help="Draw without Unicode.")
@click.option(
    "--every", default=1.0, show_default=True, type=click.FloatRange(0.1), help="Seconds."
)
def watch(
    runs: tuple[str, ...],
    *,
    metrics: tuple[str, ...],
    once: bool,
    plain: bool,
    every: float,
) -> None:
    """Show how RUNS train: curves, figures, time left, checkpoints and state.

    Each of RUNS is the folder of a run, or one above several, whose curves are shown in one
    picture. It only reads files, so it works over ssh, and also for runs that were started
    elsewhere. It ends when no run is running any more, or with Ctrl-C, which leaves the runs alone.
    """
    found = _found_runs(runs)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name may have letters that a terminal lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    console = Console(highlight=False)
    has_unicode = (console.encoding or "").lower().startswith("utf")

    def look() -> tuple[Group, bool]:
        rows = [run.look() for run in found]
        is_running = any(row["state"] in ("running", "unknown") for row in rows)
        console.width = max(20, console.width)
        is_plain = plain or not has_unicode
        return render(found, rows, metrics or DEFAULT, console, is_plain=is_plain), is_running

    shown, is_running = look()
    if not once and is_running and console.is_terminal:
        over = 0
        with (
            contextlib.suppress(KeyboardInterrupt),
            Live(shown, console=console, auto_refresh=False, screen=True) as live,
        ):
            while over < _OVER:
                time.sleep(every)
                shown, is_running = look()
                live.update(shown, refresh=True)
                over = 0 if is_running else over + 1
    console.print(shown)


def _found_runs(places: Sequence[str]) -> list[WatchedRun]:
    """The runs that are in or below ``places``; if there are more than colors, those that changed
    last. Raises ``RunError`` if there is none."""
    folders: list[Path] = []
    for place in places:
        path = default_cache() / Address(place).slug if is_address(place) else Path(place)
        path = path.absolute()
        if not path.is_dir():
            raise RunError(f"{place}: no such folder; name the folder of a run, or one above runs")
        below = [path] if is_run(path) else find_runs(path).folders
        if not below:
            raise RunError(f"{place}: there is no run in it")
        folders += [folder for folder in below if folder not in folders]
    most = len(COLORS)
    if len(folders) > most:
        said = counted(len(folders), "run")
        click.echo(f"the {most} of {said} that changed last; `surefoot board` has all", err=True)
        latest = sorted(folders, key=lambda folder: changed(folder) or 0.0)[-most:]
        folders = [folder for folder in folders if folder in latest]
    return [WatchedRun(folder) for folder in folders]


def _because(row: Row) -> str:
    end = row["end"] or {}
    if row["state"] == "failed" and end.get("error"):
        return str(end["error"])
    if row["state"] == "stopped" and end.get("signal"):
        return f"by {end['signal']}; it can be resumed"
    if row["is_stalled"]:
        return f"no step for {counted(int(row['silent_seconds'] // 60), 'minute')}"
    return EVIDENCE[row["evidence"]]


def render(
    runs: Sequence[WatchedRun],
    rows: Sequence[Row],
    names: Sequence[str],
    console: Console,
    *,
    is_plain: bool,
) -> Group:
    """The whole screen: a line or a few for each run, and pictures below, as many as fit."""
    lines = [line for number in range(len(rows)) for line in _facts(rows, number, is_plain)]
    taken = sum(len(line.wrap(console, console.width)) for line in lines)
    left = max(_LEAST_HEIGHT, console.height - taken - 1)
    groups = _groups(runs, names)
    columns = max(1, min(console.width // _LEAST_WIDTH, len(groups)))
    groups = groups[: left // _LEAST_HEIGHT * columns]
    height = min(_MOST_HEIGHT, left // max(1, -(-len(groups) // columns)))
    pictures = Table.grid(padding=0)
    panels = [_panel(one, console.width // columns, height, is_plain) for one in groups]
    for first in range(0, len(panels), columns):
        pictures.add_row(*panels[first : first + columns])
    return Group(*lines, pictures)


NamedCurve = tuple[int, str, Curve]  # with the number of its color


def _groups(runs: Sequence[WatchedRun], names: Sequence[str]) -> list[list[NamedCurve]]:
    """The curves of each picture: those of a metric of all runs. The held-out loss of one run is in
    the picture of its loss."""
    groups: dict[str, list[NamedCurve]] = {}
    for name in names:
        is_second = len(runs) == 1 and name == "eval_loss" and "loss" in groups
        for number, run in enumerate(runs):
            if curve := run.curve(name):
                group = groups.setdefault("loss" if is_second else name, [])
                group.append((number + is_second, name, curve))
    return list(groups.values())


def _facts(rows: Sequence[Row], number: int, is_plain: bool) -> Iterator[Text]:
    """A run in words: one line of many, more of one."""
    row, head = rows[number], Text(no_wrap=True, overflow="crop")
    if len(rows) > 1:
        head.append(f"{MARKS[number] if is_plain else '●'} ", style=COLORS[number])
    head.append(one_line(row["name"]), style="bold")
    head.append(f"  {row['state']}", style=STATES.get(row["state"], ""))
    parts = list(_parts(row))
    if len(rows) > 1:
        yield head.append("".join(f"  {part}" for part in parts[:5]))
        return
    because, problem = row.get("because"), row.get("metrics_problem")
    yield head.append(f" ({one_line(because)})" if because else "", style="dim")
    if problem:
        yield Text(one_line(problem), "red", no_wrap=True, overflow="crop")
    yield Text("  ".join(parts))


def _parts(row: Row) -> Iterator[str]:
    step, most = row.get("step"), row.get("max_steps")
    if step is not None:
        yield f"step {step:,}" + (f"/{most:,} ({100 * step / most:.0f} %)" if most else "")
    if (left := row.get("seconds_left")) is not None:
        yield f"left {duration(left)}"
    yield from (form.format(row[name]) for name, form in FORMS.items() if row.get(name) is not None)
    if memory := row.get("peak_memory"):
        yield f"memory {memory / 2**30:.1f} GiB"
    if saved := row.get("checkpoints"):
        yield f"checkpoints {'... ' * (len(saved) > 4)}{', '.join(map(str, saved[-4:]))}"


def _panel(group: Sequence[NamedCurve], width: int, height: int, is_plain: bool) -> Panel:
    """Curves with their names and last values above, and the ends of their scales below."""
    title = Text()
    if num_odd := sum(value is None for _, _, (_, values) in group for value in values):
        title.append(f"({num_odd} not finite)", style="bold red")
    is_of_runs = len(group) > 1 and len({name for _, name, _ in group}) == 1
    for number, name, (_, values) in group[:1] if is_of_runs else group:
        last = next((value for value in reversed(values) if value is not None), None)
        shown = "" if is_of_runs or last is None else f" {last:.4g}"
        title.append(" " if title else "")
        title.append(f"{one_line(name)}{shown}", style="bold" if is_of_runs else COLORS[number])
    pairs = [zip(steps, values, strict=True) for _, _, (steps, values) in group]
    points = [[(step, value) for step, value in one if value is not None] for one in pairs]
    body, scale = Text(no_wrap=True, overflow="crop"), None
    if any(points):
        for row in picture(points, max(4, width - 2), max(2, height - 2), is_plain=is_plain):
            for number, part in groupby([*row, ("\n", None)], itemgetter(1)):
                style = "" if number is None else COLORS[group[number][0]]
                body.append("".join(character for character, _ in part), style=style)
        ((first, low), (last_step, high)) = _ends(points)
        scale = f"{low:.4g} to {high:.4g}, steps {first:,.0f} to {last_step:,.0f}"
    frame = box.ASCII if is_plain else box.ROUNDED
    return Panel(
        body,
        frame,
        title=title,
        subtitle=scale,
        title_align="left",
        subtitle_align="right",
        width=width,
        height=height,
        padding=0,
        border_style="dim",
    )


def picture(
    curves: Sequence[Points], width: int, height: int, *, is_plain: bool
) -> list[list[tuple[str, int | None]]]:
    """Curves in ``width`` by ``height`` characters, each with the number of the curve that it is
    of, or None."""
    (first, low), (last, high) = _ends(curves)
    across, down = (1, 1) if is_plain else (2, 4)
    cells: dict[tuple[int, int], tuple[int, int]] = {}
    for number, points in enumerate(curves):
        placed = [
            (
                round(_part(step, first, last) * (width * across - 1)),
                round((1 - _part(value, low, high)) * (height * down - 1)),
            )
            for step, value in points
        ]
        for x, y in _line(placed):
            at = x // across, y // down
            cells[at] = cells.get(at, (0, 0))[0] | _DOTS[y % down][x % across], number
    drawn = {
        at: (MARKS[number] if is_plain else chr(_BLANK + dots), number)
        for at, (dots, number) in cells.items()
    }
    return [[drawn.get((x, y), (" ", None)) for x in range(width)] for y in range(height)]


def _ends(curves: Sequence[Points]) -> tuple[tuple[float, float], tuple[float, float]]:
    """The first step and the least value, the last step and the largest value."""
    steps, values = zip(*(point for points in curves for point in points), strict=True)
    return (min(steps), min(values)), (max(steps), max(values))


def _part(value: float, low: float, high: float) -> float:
    """Where a value is between two others, from 0 to 1; in the middle if they are the same."""
    return (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5


def _line(points: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The pixels of a curve, neighbors joined; the longer way is walked in steps of one."""
    for (x, y), (to_x, to_y) in pairwise(points):
        length = max(abs(to_x - x), abs(to_y - y))
        for part in range(length):
            yield x + round((to_x - x) * part / length), y + round((to_y - y) * part / length)
    yield from points[-1:]
