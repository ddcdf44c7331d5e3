"""``surefoot data``: look at the rows of a recipe."""

import click

from .check import check


@click.group()
def data() -> None:
    """Check the rows of a recipe before training."""


for command in (check,):
    data.add_command(command)
