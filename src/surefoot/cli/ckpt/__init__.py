"""``surefoot ckpt``: what checkpoints there are, what is in them, whether they are whole, what
differs between two, which can go, and how others read them.

Whatever needs torch is imported by the command that needs it, so that ``ls`` answers at once.
"""

import click

from .cat import cat
from .convert import convert
from .diff import diff
from .ls import ls
from .plan import plan
from .prune import prune
from .show import show
from .verify import verify_command


@click.group()
def ckpt() -> None:
    """List, show, compare, verify, prune and convert checkpoints."""


for command in (ls, show, diff, cat, verify_command, prune, convert, plan):
    ckpt.add_command(command)
