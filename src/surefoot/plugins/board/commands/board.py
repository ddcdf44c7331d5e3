"""``surefoot board``: runs, curves, checkpoints and conversations in a browser."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

import click

from ....errors import RunError
from .runs import ROOT

_MAX_OPEN = 512  # connections at a time; a page has up to six


@click.command()
@click.argument("root", default=".", type=ROOT)
@click.option("--port", default=7860, show_default=True, type=click.IntRange(0, 65535))
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. Others than this machine's own need the token that is printed.",
)
@click.option(
    "--host-name",
    "host_names",
    multiple=True,
    metavar="NAME",
    help="A name, besides this machine's own, under which browsers open the board, such as that of "
    "a proxy; may be repeated. It needs the token, too.",
)
@click.option(
    "--read-only", is_flag=True, help="Show only: nothing is started, stopped, written or deleted."
)
@click.option(
    "--folder",
    "folders",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A folder outside of ROOT whose models and datasets recipes may name; may be repeated. "
    "With --folder or a --host that others reach, they may name no other.",
)
def board(
    root: Path,
    port: int,
    host: str,
    *,
    host_names: tuple[str, ...],
    read_only: bool,
    folders: tuple[Path, ...],
) -> None:
    """Show all runs below ROOT in a browser: curves, checkpoints, new runs, data and chat.

    The board only reads files. Runs that were started elsewhere are shown as well. Runs that it
    starts are processes of their own: they continue when the page or the board is closed.
    """
    try:
        from ....storage import web
        from ..app import create_app
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("fastapi", "uvicorn", "starlette"):
            raise
        raise RunError(
            f"the board needs {error.name}, which is not installed: pip install 'surefoot[board]'"
        ) from None
    hosts = web.hosts_of(host, host_names)
    token = secrets.token_urlsafe(24) if hosts.is_open else None
    app = create_app(root, token, hosts=hosts, is_read_only=read_only, folders=folders)
    with contextlib.closing(web.bound(host, port, "board")) as listener:
        address = web.address_of(host, listener) + (f"?token={token}" if token else "")
        click.echo(f"board of {root}\n{address}  (Ctrl-C ends the board, not the runs)")
        # pages keep a connection open, so the end waits for none
        web.serve(app, listener, seconds_to_finish=1, most_connections=_MAX_OPEN)
