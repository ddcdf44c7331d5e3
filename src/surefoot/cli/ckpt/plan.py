"""``surefoot ckpt plan``: what a conversion would read and write, without writing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click
from rich.text import Text

from ...errors import counted
from ...storage.address import Address
from ..table import JSON, cell, console, fitted, in_bytes, print_json
from .checkpoint_path import PLACE, local
from .convert import LAYOUTS, LayoutName

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
    from ..option_text import parse_mesh

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
