"""``surefoot board``, ``runs``, ``watch`` and ``stop``: runs in a browser, on the terminal and as
JSON.

What the terminal shows of a run is the board's: its state with the evidence, figures and curves.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...checkpoint.disk.commit import committed, step_of
from ...cli.table import JSON, cell, console, fitted, number, print_json
from ...errors import RunError, SurefootError, counted, installation
from ...run.goodput import PARTS, ledger_of
from ...storage.remote import Address, default_cache, is_address
from ...terminal_text import duration, one_line, visible
from ...training.callbacks.launches import request_stop
from .board import Board, matches
from .run_folders import find_runs, is_run
from .run_state import EVIDENCE, Row, changed, state_of

ROOT = click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True)
_MAX_OPEN = 512  # connections at a time; a page has up to six
_STYLES = {"running": "green", "complete": "", "failed": "red", "died": "red", "gone": "red"}
_NUMBERS = ("step", "loss", "metric", "tokens/s")
_OPTIONAL = ("tokens/s", "metric", "last resume", "continues")
_WATCHED = ("loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second")
_MAX_WATCHED = 8  # runs
_POINTS = 2000  # of a curve
_MAX_WIDTH = 60  # of a curve, in characters
_WIDTH_WITH_SCALE = 90  # of a terminal that has room for the numbers of a scale
_STOP_PAUSE = 0.5  # seconds between two looks whether a run has ended
_AFTER_END = 2  # looks at runs that have ended, for what was just being written
_BLOCKS, _PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", "_.-~=+*#"


@click.command()
@click.argument("root", default=".", type=ROOT)
@click.option("--port", default=7860, show_default=True, type=click.IntRange(0, 65535))
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. Others than this machine's own need the token that is printed.",
)
@click.option(
    "--host-name",
    "host_names",
    multiple=True,
    metavar="NAME",
    help="A name, besides this machine's own, under which browsers open the board, such as that of "
    "a proxy; may be repeated. It needs the token, too.",
)
@click.option(
    "--read-only", is_flag=True, help="Show only: nothing is started, stopped, written or deleted."
)
@click.option(
    "--folder",
    "folders",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A folder outside of ROOT whose models and datasets recipes may name; may be repeated. "
    "With --folder or a --host that others reach, they may name no other.",
)
def board(
    root: Path,
    port: int,
    host: str,
    *,
    host_names: tuple[str, ...],
    read_only: bool,
    folders: tuple[Path, ...],
) -> None:
    """Show all runs below ROOT in a browser: curves, checkpoints, new runs, data and chat.

    The board only reads files. Runs that were started elsewhere are shown as well. Runs that it
    starts are processes of their own: they continue when the page or the board is closed.
    """
    try:
        from ...storage import web
        from .app import create_app
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("fastapi", "uvicorn", "starlette"):
            raise
        raise RunError(
            f"the board needs {error.name}, which is not installed: "
            f"{installation('fastapi', 'board')}"
        ) from None
    hosts = web.hosts_of(host, host_names)
    token = secrets.token_urlsafe(24) if hosts.is_open else None
    app = create_app(root, token, hosts=hosts, is_read_only=read_only, folders=folders)
    with contextlib.closing(web.bound(host, port, "board")) as listener:
        address = web.address_of(host, listener) + (f"?token={token}" if token else "")
        click.echo(f"board of {root}\n{address}  (Ctrl-C ends the board, not the runs)")
        # pages keep a connection open, so the end waits for none
        web.serve(app, listener, seconds_to_finish=1, most_connections=_MAX_OPEN)


class _Runs(click.Group):
    """``runs ROOT`` is ``runs list ROOT``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Add the name of the command that is meant without one."""
        names = (*self.commands, *self.get_help_option_names(ctx))
        return super().parse_args(ctx, args if args and args[0] in names else ["list", *args])


@click.group(cls=_Runs)
def runs() -> None:
    """List the runs below a folder, or say where the time of one went.

    `surefoot runs ROOT` is `surefoot runs list ROOT`.
    """


@runs.command()
@click.argument("place", metavar="RUN")
@JSON
def goodput(place: str, *, as_json: bool) -> None:
    """Say where the time of RUN went, over all of its launches, also those that were killed.

    Its parts sum to the time from the first launch to the last sign of life. Goodput is the share
    of `trained`: of steps that are part of the run.
    """
    ledger = ledger_of(_folder(place, "name the folder of a run"))
    if not ledger.num_launches:
        raise RunError(f"{place}: there is no record of launches in it")
    if as_json:
        print_json(ledger.as_data())
        return
    launches, steps = (
        counted(ledger.num_launches, "launch", "launches"),
        counted(ledger.step, "step"),
    )
    repeated = counted(ledger.num_repeated_steps, "step")
    screen = console()
    screen.print(f"{launches} in {duration(ledger.wall)}, {steps}, and {repeated} repeated")
    parts = {name: seconds for name, seconds in ledger.seconds.items() if seconds}
    columns = {
        "time": [cell(name) for name in parts],
        "h:mm:ss": [cell(duration(seconds)) for seconds in parts.values()],
        "%": [cell(f"{100 * seconds / (ledger.wall or 1):.1f}") for seconds in parts.values()],
        "what": [cell(PARTS[name]) for name in parts],
    }
    screen.print(fitted(screen, columns, numbers=("h:mm:ss", "%"), optional=("what",)))


@runs.command("list")
@click.argument("root", default=".", type=ROOT)
@click.option(
    "--filter", "words", default="", help="Only runs that have all of these words, as 'died lora'."
)
@JSON
def list_runs(root: Path, words: str, *, as_json: bool) -> None:
    """List the runs in and below ROOT.

    The state of each comes from its lock and its record. A word of --filter is searched in names,
    states, models, stages and methods. With --json, a run also has its evidence, its last launch
    and its end.
    """
    run_table = Board(root).table()
    rows = [row for row in run_table["runs"] if matches(row, words)]
    if as_json:
        print_json({**run_table, "runs": rows})
        return
    screen = console()
    if not rows:
        screen.print(cell(f"{run_table['root']}: no runs"))
        return
    columns = {name: cells for name, cells in _columns(rows).items() if any(cells)}
    screen.print(fitted(screen, columns, numbers=_NUMBERS, optional=_OPTIONAL))
    if run_table["is_cut"]:
        screen.print("there may be more runs: the search ended at its limit", style="yellow")


def _columns(rows: Sequence[Row]) -> dict[str, list[Text]]:
    cells = {
        "step": [_step(row) for row in rows],
        "loss": [number(row["loss"]) for row in rows],
        "metric": [number(row["metric"]["value"]) for row in rows],
        "tokens/s": [number(row["speed"]) for row in rows],
    }
    return {
        "run": [cell(row["name"] if row["run"] == "." else row["run"]) for row in rows],
        "state": [Text(row["state"], style=_STYLES.get(row["state"], "yellow")) for row in rows],
        **{name: [cell(text) for text in texts] for name, texts in cells.items()},
        "continues": [cell(row.get("begins_with") or "") for row in rows],
        "last resume": [cell(row["change"] or "") for row in rows],
    }


def _step(row: Row) -> str:
    if row["step"] is None:
        return ""
    total = row["max_steps"]
    return f"{row['step']:,}" if total in (None, row["step"]) else f"{row['step']:,} / {total:,}"


@click.command()
@click.argument("places", metavar="RUNS...", nargs=-1, required=True)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    help="A curve to show, such as reward; repeat it for more. Without it: loss and eval_loss, "
    "learning_rate, grad_norm, tokens_per_second.",
)
@click.option("--once", is_flag=True, help="Print the state of now, and end.")
@click.option(
    "--every", default=1.0, show_default=True, type=click.FloatRange(0.1), help="Seconds."
)
def watch(places: tuple[str, ...], *, metrics: tuple[str, ...], once: bool, every: float) -> None:
    """Show how RUNS train: curves, figures, time left, checkpoints and state.

    Each of RUNS is the folder of a run, or one above several. It only reads files, so it works over
    ssh, and also for runs that were started elsewhere. It ends when no run is running any more, or
    with Ctrl-C, which leaves the runs alone.
    """
    boards = [Board(folder) for folder in _watched(places)]
    screen = Console(markup=False, highlight=False)
    screen.width = max(20, screen.width)

    def look() -> tuple[Group, bool]:
        rows = [_look(board, metrics or _WATCHED) for board in boards]
        is_running = any(row["state"] in ("running", "unknown") for row in rows)
        parts: list[Text | Table] = []
        for row in rows:
            parts += [*_facts(row), _curves(row["series"], screen)]
        return Group(*parts), is_running

    shown, is_running = look()
    if not once and is_running and screen.is_terminal:
        after = 0
        with (
            contextlib.suppress(KeyboardInterrupt),
            Live(shown, console=screen, auto_refresh=False, screen=True) as live,
        ):
            while after < _AFTER_END:
                time.sleep(every)
                shown, is_running = look()
                live.update(shown, refresh=True)
                after = 0 if is_running else after + 1
    # The alternate screen is gone, and what it showed last with it.
    screen.print(shown)


@click.command()
@click.argument("place", metavar="RUN")
@click.option("--no-wait", is_flag=True, help="Do not wait until the run has ended.")
def stop(place: str, *, no_wait: bool) -> None:
    """Let RUN finish its step, save and end, as Ctrl-C does: it exits with 130.

    RUN is the folder of a run that trains on this machine or on another one that sees the folder
    too, or the URL of a run in an object store, wherever it trains. The run looks for the request
    about once a second, between two steps, and every 15 seconds in a store. The next launch
    resumes. If a launcher restarts whatever ends with an error, end its job there instead.
    """
    if is_address(place):
        from ...checkpoint.remote import stores

        for line in stores().stop(_address(place), wait=not no_wait):
            click.echo(visible(line), err=True)
        return
    folder = _folder(place, "name the folder of a run")
    before = state_of(folder)
    if before.evidence == "starting":
        raise RunError(f"{place}: is not training yet; try again when it has begun")
    if before.name not in ("running", "unknown"):
        raise RunError(f"{place}: no process is training there; the run is {before.name}")
    request_stop(folder)
    click.echo(f"{place}: requested; the run ends after its step and a save", err=True)
    after = before
    while not no_wait and after.name in ("running", "unknown"):
        time.sleep(_STOP_PAUSE)
        after = state_of(folder)
        is_same = after.launch == before.launch or None in (before.launch, after.launch)
        if before.end is None and not is_same:
            raise RunError(f"{place}: stopped, but a launcher has started it again; end its job")
    if after.name in ("failed", "died", "ended"):
        reason = (after.end or {}).get("error") or EVIDENCE[after.evidence]
        raise RunError(f"{place}: the run has ended, and not by a stop: {reason}")
    if not no_wait:
        click.echo(
            f"{place}: {after.name} at step {(after.end or {}).get('step')}, saved", err=True
        )


def _folder(place: str, advice: str) -> Path:
    """A folder, or that of a run in an object store on this machine. Raises ``RunError``."""
    path = default_cache() / _address(place).slug if is_address(place) else Path(place)
    path = path.absolute()
    if not path.is_dir():
        raise RunError(f"{place}: no such folder; {advice}")
    return path


def _address(place: str) -> Address:
    try:
        return Address(place)
    except ValueError as error:
        raise RunError(str(error)) from None


def _watched(places: Sequence[str]) -> list[Path]:
    """The runs that are in or below ``places``; of many, those that changed last. Raises
    ``RunError`` if there is none."""
    folders: list[Path] = []
    for place in places:
        path = _folder(place, "name the folder of a run, or one above runs")
        below = [path] if is_run(path) else find_runs(path).folders
        if not below:
            raise RunError(f"{place}: there is no run in it")
        folders += [folder for folder in below if folder not in folders]
    if len(folders) <= _MAX_WATCHED:
        return folders
    shown_runs = f"the {_MAX_WATCHED} of {counted(len(folders), 'run')} that changed last"
    click.echo(f"{shown_runs}; `surefoot board` has all", err=True)
    latest = sorted(folders, key=lambda folder: changed(folder) or 0.0)[-_MAX_WATCHED:]
    return [folder for folder in folders if folder in latest]


def _look(board: Board, metrics: Sequence[str]) -> Row:
    """The row of the board's table with curves and checkpoints. A run that vanishes is gone."""
    name = board.root.name
    try:
        names = [*metrics, "peak_memory"]
        curves: dict[str, Any] = board.series(".", names, _POINTS, -math.inf, math.inf, 0)
        steps = [step_of(path) for path in committed(board.root)]
    except SurefootError:
        return {"name": name, "state": "gone", "because": "", "problem": None, "series": {}}
    row = board.summaries.of(board.root)
    return {**row, **curves, "because": _because(row), "checkpoints": steps}


def _because(row: Row) -> str:
    end = row["end"] or {}
    if row["state"] == "failed" and end.get("error"):
        return str(end["error"])
    if row["state"] == "stopped" and end.get("signal"):
        return f"by {end['signal']}; it can be resumed"
    if row["is_stalled"]:
        return f"no step for {counted(int(row['silent_seconds'] // 60), 'minute')}"
    return str(row["because"])


def _facts(row: Row) -> Iterator[Text]:
    """A run in words."""
    state = Text(no_wrap=True, overflow="crop")
    state.append(one_line(row["name"]), style="bold")
    state.append(f"  {row['state']}", style=_STYLES.get(row["state"], "yellow"))
    yield state.append(f" ({one_line(row['because'])})" if row["because"] else "", style="dim")
    if row.get("change"):
        yield Text(one_line(row["change"]), no_wrap=True, overflow="crop")
    if row["problem"]:
        yield Text(one_line(row["problem"]), "red", no_wrap=True, overflow="crop")
    step, total = row.get("step"), row.get("max_steps")
    parts = []
    if step is not None:
        share = f"/{total:,} ({100 * step / total:.0f} %)" if total else ""
        parts.append(f"step {step:,}{share}")
    if (left := row.get("seconds_left")) is not None:
        parts.append(f"left {duration(left)}")
    if memory := row["series"].get("peak_memory"):
        parts.append(f"memory {memory['values'][-1] / 2**30:.1f} GiB")
    if saved := row.get("checkpoints"):
        parts.append(f"checkpoints {'... ' * (len(saved) > 4)}{', '.join(map(str, saved[-4:]))}")
    yield Text("  ".join(parts))


def _curves(series: Mapping[str, Any], screen: Console) -> Table:
    """A line for each metric: its curve, its last value and its scale."""
    is_unicode = (screen.encoding or "").lower().startswith("utf")
    has_scale = screen.width >= _WIDTH_WITH_SCALE
    width = max(4, min(_MAX_WIDTH, screen.width - (62 if has_scale else 32)))
    lines = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3 + has_scale):
        lines.add_column(no_wrap=True, overflow="crop")
    for name, curve in series.items():
        values, steps = curve["values"], curve["steps"]
        finite = [value for value in values if value is not None]
        if name == "peak_memory" or not finite:
            continue
        scale = f"{number(min(finite))} to {number(max(finite))}, "
        scale += f"steps {steps[0]:,.0f} to {steps[-1]:,.0f}"
        if num_odd := len(values) - len(finite):
            scale = f"({num_odd} not finite) {scale}"
        drawn = Text(sparkline(values, width, _BLOCKS if is_unicode else _PLAIN_BLOCKS), "cyan")
        cells = [Text(one_line(name)), drawn, Text(number(finite[-1])), Text(scale, "dim")]
        lines.add_row(*cells[: 3 + has_scale])
    return lines


def sparkline(values: Sequence[float | None], width: int, blocks: str) -> str:
    """A curve in at most ``width`` blocks, each as high as the largest of its values, so that no
    spike is lost. A block without a value is as the one before."""
    finite = [value for value in values if value is not None]
    low, high = min(finite), max(finite)
    bounds = [len(values) * n // width for n in range(width + 1)]
    if len(values) < width:
        bounds = list(range(len(values) + 1))
    drawn = ""
    for start, end in itertools.pairwise(bounds):
        top = max((v for v in values[start:end] if v is not None), default=None)
        if top is None:
            drawn += drawn[-1:] or " "
            continue
        # halves, since the difference of the largest floats is infinite
        part = (top / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5
        drawn += blocks[round(part * (len(blocks) - 1))]
    return drawn
