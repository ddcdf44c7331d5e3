"""``surefoot runs``: what the board shows of runs, on the terminal and as JSON."""

import click

from .curves import curves
from .diff import diff
from .ls import ls
from .samples import samples
from .show import show


@click.group()
def runs() -> None:
    """List runs, show one, compare recipes, and print curves."""


for command in (ls, show, curves, samples, diff):
    runs.add_command(command)
