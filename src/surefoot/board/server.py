"""Start the server of the board, and say where it is."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from ..storage import web
from .app import create_app

MAX_OPEN = 512  # connections at a time; a page has up to six


def serve(
    root: Path,
    host: str,
    port: int,
    announce: Callable[[str], None],
    *,
    host_names: Sequence[str] = (),
    is_read_only: bool = False,
    folders: Sequence[Path] = (),
) -> None:
    """Serve until Ctrl-C. Raises ``RunError`` if the address cannot be used."""
    hosts = web.hosts_of(host, host_names)
    token = secrets.token_urlsafe(24) if hosts.is_open else None
    app = create_app(root, token, hosts=hosts, is_read_only=is_read_only, folders=folders)
    with contextlib.closing(web.bound(host, port, "board")) as listener:
        announce(web.address_of(host, listener) + (f"?token={token}" if token else ""))
        # pages keep a connection open, so nothing is waited for at the end
        web.serve(app, listener, seconds_to_finish=1, most_connections=MAX_OPEN)
