"""Start the server of the board, and say where it is."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import RunError
from .app import create_app
from .host_names import hosts_of

MAX_OPEN = 512  # connections at a time; a page has up to six
MOST_WAITING = 256  # of them, that have not asked anything yet
SECONDS_FOR_HEADERS = 20.0


class PromptProtocol(H11Protocol):
    """HTTP for addresses that strangers reach: headers come within a time, and who has not asked
    anything yet makes room for whoever comes. Otherwise connections that ask nothing would keep
    the owner out."""

    _since = 0.0  # when it began to wait for a request
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A visitor has come."""
        super().connection_made(transport)
        self._wait()
        known = [one for one in self.connections if isinstance(one, PromptProtocol)]
        waiting = [one for one in known if one.is_waiting and not one.transport.is_closing()]
        if len(waiting) > MOST_WAITING:
            min(waiting, key=lambda one: one._since).transport.close()

    def data_received(self, data: bytes) -> None:
        """A part of a request, or all of it."""
        super().data_received(data)
        if not self.is_waiting:
            self._stop()
        elif self._timer is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """The visitor has left."""
        self._stop()
        super().connection_lost(exc)

    @property
    def is_waiting(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _wait(self) -> None:
        self._since = self.loop.time()
        self._timer = self.loop.call_later(SECONDS_FOR_HEADERS, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


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
    hosts = hosts_of(host, host_names)
    token = secrets.token_urlsafe(24) if hosts.is_open else None
    app = create_app(root, token, hosts=hosts, is_read_only=is_read_only, folders=folders)
    listener = bound(host, port, "board")
    address = address_of(host, listener)
    announce(address + (f"?token={token}" if token else ""))
    config = uvicorn.Config(
        app,
        http=PromptProtocol,
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
