"""``surefoot watch``: curves, figures and states of runs in the terminal."""

from __future__ import annotations

import io
import json
import sys
import time

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..board.watch.view import DEFAULT, render, terminal_size
from ..board.watch.watched import WatchedRun, found_runs
from ..terminal_text import visible

_OVER = 2  # looks at runs that have ended, for what was just being written


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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with all curves.")
@click.option("--plain", is_flag=True, help="Draw without Unicode.")
@click.option(
    "--every", default=1.0, show_default=True, type=click.FloatRange(0.1), help="Seconds."
)
def watch(
    runs: tuple[str, ...],
    *,
    metrics: tuple[str, ...],
    once: bool,
    as_json: bool,
    plain: bool,
    every: float,
) -> None:
    """Show how RUNS train: curves, figures, time left, checkpoints and state.

    Each of RUNS is the folder of a run, or one above several, whose curves are shown in one
    picture. It only reads files, so it works over ssh, and also for runs that were started
    elsewhere. It ends when no run is running any more, or with Ctrl-C, which leaves the runs alone.
    """
    found, note = found_runs(runs)
    if as_json:
        click.echo(visible(json.dumps({"runs": [_facts(run) for run in found]})))
        return
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name may have letters that a terminal lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    console = Console(highlight=False)
    names = metrics or DEFAULT
    if note is not None:
        click.echo(note, err=True)

    def picture() -> tuple[Text, bool]:
        rows = [run.look() for run in found]
        is_running = any(row["state"] in ("running", "unknown") for row in rows)
        return render(found, rows, names, terminal_size(console, is_plain=plain)), is_running

    shown, is_running = picture()
    if once or not is_running or not console.is_terminal:
        console.print(shown, soft_wrap=True)
        return
    over = 0
    with Live(shown, console=console, auto_refresh=False, screen=True) as live:
        try:
            while over < _OVER:
                time.sleep(every)
                shown, is_running = picture()
                live.update(shown, refresh=True)
                over = 0 if is_running else over + 1
        except KeyboardInterrupt:
            pass
    console.print(shown, soft_wrap=True)


def _facts(run: WatchedRun) -> dict[str, object]:
    """Everything that is known of a run."""
    row = run.look()
    names = sorted(run.metrics.columns)
    curves = {name: curve for name in names if (curve := run.curve(name)) is not None}
    series = {name: {"steps": c.steps, "values": c.values} for name, c in curves.items()}
    return {**row, "series": series}
