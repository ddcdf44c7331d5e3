"""``surefoot ckpt convert``: a checkpoint in another layout, or as another program reads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from rich.text import Text

from ...errors import counted
from ...storage.address import Address
from ..table import JSON, PLACE, cell, console, fitted, in_bytes, local, print_json, reading
from ..targets import TargetCommand, naming_packages, target_of

if TYPE_CHECKING:
    from ...checkpoint.converting.origin import Done


LAYOUTS = ("full", "distributed")
LayoutName = Literal["full", "distributed"]


@click.command(cls=TargetCommand)
@click.argument("checkpoint", metavar="SRC", type=PLACE)
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@JSON
def convert(
    checkpoint: Path | Address, target: Path, kind: str | None, as_json: bool, **options: object
) -> None:
    """Write SRC, a checkpoint, in another layout or as another program reads it.

    DST is a new folder, which appears when all of it is written. SRC is not changed. Tensors are
    copied from file to file: no model is built, and memory does not grow with it.
    """
    from ...checkpoint.converting.origin import OptionError
    from ...use.exporting.conversion import convert as write

    given = {name: value for name, value in options.items() if value}
    kind = kind or _usual(given)
    options_of_source = _reading(kind, given)
    try:
        to = target_of(kind, given)
        with reading("converting", None) as advance, naming_packages(to):
            done = write(local(checkpoint), target, to, advance, options_of_source)
    except OptionError as error:
        raise click.UsageError(str(error)) from None
    _report(target, kind, done, as_json=as_json)


def _usual(given: dict[str, object]) -> str:
    from ...checkpoint.converting.targets import TARGETS
    from ...use.exporting.conversion import USUAL

    if "layout" not in given and "mesh" not in given:
        names = f"--to ({', '.join(TARGETS)}) or --layout ({', '.join(LAYOUTS)})"
        raise click.UsageError(f"expected what to write: {names}")
    return USUAL


def _reading(kind: str, given: dict[str, Any]) -> dict[str, object]:
    """Take from ``given`` what is an option of SRC, and none of the target."""
    from ...checkpoint.converting.targets import READING, TARGETS
    from ...schema import settings

    of_source = {name for cls in READING.values() for name in settings(cls)}
    taken = of_source - settings(TARGETS[kind]).keys()
    return {name: given.pop(name) for name in list(given) if name in taken}


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


_SHOWN = 12  # files in a table; --json has all


@click.command()
@click.argument("checkpoint", metavar="SRC", type=PLACE)
@click.option(
    "--layout",
    type=click.Choice(LAYOUTS),
    help="Layout of the Surefoot checkpoint: full (unsharded tensors), or distributed (one "
    "folder of shards per rank).",
)
@click.option(
    "--mesh",
    metavar="AXIS=N[,AXIS=N]",
    help="The mesh whose shards are written: dp_shard=4, dp_shard=4,tp=2, dp_replicate=2 …",
)
@click.option(
    "--dtype",
    type=click.Choice(("float32", "float16", "bfloat16")),
    help="Dtype of the weights; the optimizer state is not changed.",
)
@JSON
def plan(
    checkpoint: Path | Address,
    layout: LayoutName | None,
    mesh: str | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Show what `ckpt convert` would read and write for SRC: files, bytes, and bytes by rank.

    The default layout is full, with --mesh distributed. Nothing is written, and only the headers of
    tensor files are read. manifest.json itself is not counted.
    """
    from ...checkpoint.converting.resharding import plan_reshard
    from ...parallel.sharding import Mesh
    from ..targets import parse_mesh

    wanted = layout or ("full" if mesh is None else "distributed")
    processes = Mesh() if mesh is None else parse_mesh(mesh)
    found = plan_reshard(local(checkpoint), layout=wanted, mesh=processes, dtype=dtype)
    ranks = found.by_rank
    facts: dict[str, object] = {
        "path": found.folder,
        "from": {"layout": found.manifest.layout, "mesh": found.manifest.mesh},
        "to": {"layout": found.layout, "mesh": found.mesh.axes},
        "reads": {"num_bytes": sum(found.reads.values()), "files": found.reads},
        "writes": {"num_bytes": sum(found.writes.values()), "files": found.writes},
        "ranks": {"count": len(ranks), "largest": max(ranks), "mean": sum(ranks) / len(ranks)},
    }
    if as_json:
        print_json(facts)
        return
    screen = console()
    _print("reads", found.reads)
    screen.print()
    _print("writes", found.writes)
    if len(ranks) > 1:
        largest, mean = in_bytes(max(ranks)), in_bytes(round(sum(ranks) / len(ranks)))
        screen.print(f"\n{len(ranks)} ranks: the largest {largest}, the mean {mean}")


def _print(what: str, sizes: Mapping[str, int]) -> None:
    """The largest files, in the order of their names, and the sum of all."""
    screen = console()
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_SHOWN]
    shown = [name for name in sizes if name in largest]
    left = [name for name in sizes if name not in largest]
    names = [cell(name) for name in shown]
    figures = [cell(in_bytes(sizes[name])) for name in shown]
    if left:
        names.append(Text(f"… {len(left):,} more (--json lists them)", style="dim"))
        figures.append(cell(in_bytes(sum(sizes[name] for name in left))))
    names.append(Text(counted(len(sizes), "file"), style="bold"))
    figures.append(Text(in_bytes(sum(sizes.values())), style="bold"))
    screen.print(fitted(screen, {what: names, "bytes": figures}, numbers=["bytes"]))
