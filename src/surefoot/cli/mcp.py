"""``surefoot mcp``: the board for agents."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import RunError
from ..storage.address import Address
from .runs.root import ROOT


@click.command()
@click.argument("root", default=".", type=ROOT)
@click.option(
    "--allow-write",
    is_flag=True,
    help="Also start, stop and resume runs, tag, pin, prune and export.",
)
def mcp(root: Path | Address, *, allow_write: bool) -> None:
    """Let an agent see the runs below ROOT, by the Model Context Protocol.

    An agent starts this command and talks to it over standard input and output. Without
    --allow-write it changes nothing: it reads runs, curves, samples, checkpoints and recipes, and
    plans, previews and checks recipes. ROOT is a folder, or the address of one in an object store.
    """
    try:
        from ..board.agents.server import create_server
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("mcp", "mcp_types"):
            raise
        raise RunError(
            "agents need the package mcp, which is not installed: pip install 'surefoot[mcp]'"
        ) from None
    from ..board.board import open_board

    create_server(open_board(root), may_write=allow_write).run("stdio")
