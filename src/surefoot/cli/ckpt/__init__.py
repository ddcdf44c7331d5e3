"""``surefoot ckpt``: list, inspect, verify, compare, prune and convert checkpoints.

Modules that need torch are imported by the command that needs them, so that ``ls`` starts at once.
"""

import click

from .contents import ls, show
from .convert import convert
from .diff import diff
from .keeping import pin_command, prune, verify_command


@click.group()
def ckpt() -> None:
    """List, show, compare, verify, prune and convert checkpoints."""


for command in (ls, show, diff, verify_command, prune, pin_command, convert):
    ckpt.add_command(command)
