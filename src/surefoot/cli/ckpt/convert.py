"""``surefoot ckpt convert``: a checkpoint in another layout, or as another program reads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...errors import counted
from ...storage.remote import Address
from ..table import JSON, PLACE, local, print_json, reading
from ..targets import TargetCommand, naming_packages, reading_of_source, target_of

if TYPE_CHECKING:
    from ...checkpoint.converting.targets import Done


@click.command(cls=TargetCommand)
@click.argument("checkpoint", metavar="SRC", type=PLACE)
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@click.option(
    "--verify/--no-verify",
    default=True,
    help="Read DST again, and compare the names and hashes of its tensors with those that were "
    "written (default).",
)
@JSON
def convert(
    checkpoint: Path | Address,
    target: Path,
    verify: bool,
    kind: str | None,
    as_json: bool,
    **options: object,
) -> None:
    """Write SRC, a checkpoint, in another layout or as another program reads it.

    DST is a new folder, which appears when all of it is written. SRC is not changed. Tensors are
    copied from file to file: no model is built, and memory does not grow with it.
    """
    from ...checkpoint.converting.targets import OptionError
    from ...use.exporting.conversion import convert as write
    from ...use.exporting.conversion import verify_conversion

    explicit_options = {name: value for name, value in options.items() if value}
    kind = kind or _usual(explicit_options)
    try:
        folder = local(checkpoint)
        read_as = reading_of_source(kind, explicit_options, folder)
        to = target_of(kind, explicit_options)
        with reading("converting", None) as advance, naming_packages(to):
            done = write(folder, target, to, advance, read_as)
        if verify:
            verify_conversion(target, done)
    except OptionError as error:
        raise click.UsageError(str(error)) from None
    _report(target, kind, done, as_json=as_json)


def _usual(explicit_options: dict[str, object]) -> str:
    from ...checkpoint.converting.targets import TARGETS
    from ...use.exporting.conversion import USUAL

    if "layout" not in explicit_options and "mesh" not in explicit_options:
        names = f"--to ({', '.join(TARGETS)}) or --layout (full, distributed)"
        raise click.UsageError(f"expected what to write: {names}")
    return USUAL


def _report(target: Path, kind: str, done: Done, *, as_json: bool) -> None:
    paths = [path for path in sorted(target.rglob("*")) if path.is_file()]
    written = {str(path.relative_to(target)): path.stat().st_size for path in paths}
    if as_json:
        print_json({"path": str(target), "to": kind, "files": written, **done.notes})
        return
    files = counted(len(written), "file")
    click.echo(f"wrote {target} ({files}, {sum(written.values()):,} bytes)")
    if done.words:
        click.echo(done.words)
