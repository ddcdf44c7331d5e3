"""``surefoot push``: a model, an adapter or checkpoints on a hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...errors import counted
from ...terminal_text import in_bytes, visible

if TYPE_CHECKING:
    from .pushing import Upload


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("name", metavar="OWNER/NAME")
@click.option("--public", is_flag=True, help="Create a public repository; unset, a private one.")
@click.option(
    "--checkpoints",
    is_flag=True,
    help="Also upload all checkpoints of the run, with the states that a resume needs.",
)
@click.option("--base", metavar="ID", help="The id of an adapter's base model on the hub.")
@click.option("--license", help="License of the model; unset, that of its base.")
@click.option(
    "--replace",
    is_flag=True,
    help="Overwrite files that somebody else has put into the repository.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be uploaded, and change nothing.")
def push(path: Path, name: str, **options: Any) -> None:
    """Upload a model to Hugging Face, with a model card. It needs HF_TOKEN, or `hf auth login`.

    PATH is a run's folder (its best or latest checkpoint), a checkpoint, an adapter, a model's
    folder such as `surefoot export` writes, or a GGUF file. OWNER/NAME is created if it does not
    exist. An upload that was interrupted is continued by the same command. Secrets and folders of
    this machine are removed from texts. A repository that holds something else is not changed.
    """
    from .pushing import Destination
    from .pushing import push as upload

    target = Destination(
        name=name,
        is_private=not options["public"],
        replaces=options["replace"],
        base=options["base"],
        license=options["license"],
    )
    dry_run = options["dry_run"]
    plan = upload(path, target, checkpoints=options["checkpoints"], dry_run=dry_run)
    for line in lines(plan, dry_run=dry_run):
        click.echo(visible(line))


def lines(plan: Upload, *, dry_run: bool) -> Iterator[str]:
    """What was or would be uploaded, as text."""
    yield from (f"note: {note}" for note in plan.notes)
    if dry_run:
        yield from (f"upload {in_bytes(file.size):>9}  {file.path}" for file in plan.files)
        yield from (f"remove {'':>9}  {path}" for path in plan.removed)
    size = in_bytes(sum(file.size for file in plan.files))
    kind = "private" if plan.target.is_private else "public"
    new = f", a new {kind} repository" if plan.is_new else ""
    verb = "would upload" if dry_run else "uploaded"
    yield f"{verb} {counted(len(plan.files), 'file')} ({size}) to {plan.url}{new}"
