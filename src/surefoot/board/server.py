"""Start the server of the board, and say where it is."""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from ..errors import RunError
from ..storage.address import Address
from .app import create_app
from .host_names import hosts_of

PORT = 7860
MAX_OPEN = 256  # connections at a time; a page has up to six


def serve(
    root: Path | Address,
    host: str,
    port: int,
    announce: Callable[[str], None],
    *,
    host_names: Sequence[str] = (),
    is_read_only: bool = False,
    folders: Sequence[Path] = (),
) -> None:
    """Serve until Ctrl-C. Raises ``RunError`` if the address cannot be used."""
    hosts = hosts_of(host, host_names)
    token = secrets.token_urlsafe(24) if hosts.is_open else None
    app = create_app(root, token, hosts=hosts, is_read_only=is_read_only, folders=folders)
    listener = bound(host, port, "board")
    address = address_of(host, listener)
    announce(address + (f"?token={token}" if token else ""))
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=MAX_OPEN,
        timeout_graceful_shutdown=1,  # pages keep a connection open
    )
    with contextlib.closing(listener):
        uvicorn.Server(config).run(sockets=[listener])


def address_of(host: str, listener: socket.socket) -> str:
    """The URL of a socket that listens."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/"


def bound(host: str, port: int, what: str) -> socket.socket:
    """A socket that listens there for a ``what``. Raises ``RunError``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)  # who comes before the server is ready waits
    except OSError as error:
        listener.close()
        hint = f"; is another {what} running? choose another --port" if _is_taken(error) else ""
        raise RunError(f"cannot listen on {host}:{port}: {error.strerror}{hint}") from None
    return listener


def _is_taken(error: OSError) -> bool:
    return error.errno == errno.EADDRINUSE
