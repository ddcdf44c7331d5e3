"""``surefoot ckpt pin``: keep a checkpoint whatever the retention policy says."""

from __future__ import annotations

from pathlib import Path

import click

from ...checkpoint.disk.commit import step_of
from ...checkpoint.disk.retention import pin
from ...errors import CheckpointError
from ..table import FOLDER, JSON, print_json


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
