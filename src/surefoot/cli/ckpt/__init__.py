"""``surefoot ckpt``: list, inspect, verify, compare, prune and convert checkpoints.

Modules that need torch are imported by the command that needs them, so that ``ls`` starts at once.
"""

import click

from .cat import cat
from .convert import convert
from .diff import diff
from .ls import ls
from .pin import pin_command
from .plan import plan
from .prune import prune
from .show import show
from .verify import verify_command


@click.group()
def ckpt() -> None:
    """List, show, compare, verify, prune and convert checkpoints."""


for command in (ls, show, diff, cat, verify_command, prune, pin_command, convert, plan):
    ckpt.add_command(command)
