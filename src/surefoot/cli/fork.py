"""``surefoot fork``: continue a run from any of its steps in a new folder."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import click

from ..storage.remote import is_address
from ..terminal_text import in_bytes, visible
from .loading import loading
from .replay import local_run, ranks_of, surrounded
from .replay_text import lines_of


@click.command()
@click.argument("place", metavar="RUN")
@click.argument("new", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option(
    "--step", type=click.IntRange(1), required=True, metavar="N", help="The last step of RUN."
)
def fork(place: str, new: Path, overrides: tuple[str, ...], step: int) -> None:
    """Make NEW a run that continues RUN, the folder or URL of a run, after step N.

    \b
    surefoot fork runs/orders runs/slower --step 40 optim.adamw.learning_rate=1e-4
    surefoot fork runs/orders runs/again --step 45

    A step that is saved is shared with RUN, file by file; another one is computed again, as by
    `surefoot replay`. Then `surefoot train NEW` continues it; without OVERRIDES it ends with the
    bits of RUN. OVERRIDES are dotted fields that are taken from step N on. NEW needs nothing of RUN
    from then on, and RUN is only read.
    """
    run = local_run(place, step, step)
    launch = surrounded(run, step)
    with loading():
        from ..parallel.section import ParallelSection
        from ..parallel.world import ALONE
        from ..run.fork import continue_run, has_saved

    origin = place if is_address(place) else str(run.absolute())
    alone = nullcontext((ALONE, ParallelSection()))
    with alone if has_saved(run, step) else ranks_of(run, launch) as (world, parallel):
        made = continue_run(run, step, new, overrides, world, parallel, place=origin)
    if not world.is_main:
        return
    for line in () if made.report is None else lines_of(made.report):
        click.echo(visible(line))
    copied = f", {in_bytes(made.num_copied)} copied" if made.num_copied else ""
    click.echo(visible(f"{new}: continues {place} after step {step}{copied}"))
    click.echo(visible(f"next: surefoot train {new}"))
