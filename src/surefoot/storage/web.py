"""What all HTTP servers share: the names they answer under, their socket, and limits of patience.

DNS rebinding needs a name that an attacker owns: his page is opened by it, and then it resolves to
this machine. So names are limited to this machine's, and those that are given at the start. An
address in figures cannot be rebound. Where others reach the server, it may be that of a container's
host or of a gateway, which this machine does not know; so each is accepted there.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import re
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import uvicorn
from starlette.types import ASGIApp, Message, Receive
from uvicorn.protocols.http.h11_impl import H11Protocol

from .. import json_lines
from ..errors import RunError
from .remote import is_loopback

_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_MAX_NAME = 253  # characters, as in DNS
MOST_WAITING = 256  # connections that have not asked anything yet
SECONDS_FOR_HEADERS = 20.0


@dataclass(frozen=True)
class Hosts:
    """Names of a server. On this machine's own address, it answers to that, and to ``names``."""

    names: frozenset[str] = frozenset()  # of --host-name
    is_reached: bool = False  # by other machines
    machine: set[str] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        """Whether others than the users of this machine can send requests."""
        return self.is_reached or any(not is_loopback(name) for name in self.names)

    def refusal(self, values: Iterable[str], what: str) -> str | None:
        """Why a request with these values of ``Host`` is not for the server, a ``what``."""
        values = list(values)
        # Of two Host headers Starlette's middleware believes the first; here both are refused
        # (decisions/0070).
        name = host_name(values[0]) if len(values) == 1 else ""
        if is_loopback(name) or name in self.names:
            return None
        if self.is_reached and (name in self.machine or _is_address(name)):
            return None
        if not _is_name(name):
            shown = ", ".join(values)[:100]
            return f"Host: expected the name or address of this {what}, got {shown!r}"
        return (
            f"this {what} does not answer under the name {name}. If that is right, "
            f"start it with --host-name {name}"
        )


def hosts_of(listening: str, host_names: Iterable[str] = ()) -> Hosts:
    """The names of a server that listens at an address. Raises ``RunError`` for one of
    ``host_names`` that is no name."""
    names = set()
    for each in host_names:
        name = each.lower().strip("[]").removesuffix(".")
        if not (_is_name(name) or _is_address(name)):
            raise RunError(
                "--host-name: expected a name without scheme and port, such as "
                f"gpu-7.example.org, got {each!r}"
            )
        names.add(name)
    if is_loopback(listening):
        return Hosts(frozenset(names))
    full = socket.gethostname().lower() or "localhost"
    short = full.partition(".")[0]
    machine = {listening.lower(), full, short, f"{short}.local"}
    # the full name may need a name server that does not answer: the start does not wait for it
    threading.Thread(target=lambda: machine.add(socket.getfqdn().lower()), daemon=True).start()
    return Hosts(frozenset(names), True, machine)


def host_name(host: str) -> str:
    """``Host`` without its port and without the dot that may end a name; empty if it is neither."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises, if it is none
    except ValueError:
        return ""
    is_plain = not (parts.path or parts.query or parts.fragment or "@" in host)
    # A browser sends the dot of `gpu-7.`, which is the same name.
    return (parts.hostname or "").removesuffix(".") if is_plain else ""


def _is_name(text: str) -> bool:
    return len(text) <= _MAX_NAME and bool(_NAME.fullmatch(text))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


class LimitedBody:
    """The body of a request, at most ``most`` bytes, whatever its header says."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive, self._most, self._length = receive, most, 0

    async def __call__(self) -> Message:
        """The next part of it; as if the client had left, beyond the limit."""
        message = await self._receive()
        self._length += len(message.get("body", b""))
        if self._length > self._most:
            return {"type": "http.disconnect"}
        return message


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
        visitors = [each for each in self.connections if isinstance(each, PromptProtocol)]
        waiting = [v for v in visitors if v.is_waiting and not v.transport.is_closing()]
        if len(waiting) > MOST_WAITING:
            min(waiting, key=lambda visitor: visitor._since).transport.close()

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


def bound(host: str, port: int, what: str) -> socket.socket:
    """A socket that listens there for a ``what``. Raises ``RunError``."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    # Else the port is taken for a minute after the last server, by its closed connections.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)  # who comes before the server is ready waits
    except OSError as error:
        listener.close()
        is_taken = error.errno == errno.EADDRINUSE
        hint = f"; is another {what} running? choose another --port" if is_taken else ""
        raise RunError(f"cannot listen on {host}:{port}: {error.strerror}{hint}") from None
    return listener


def address_of(host: str, listener: socket.socket) -> str:
    """The URL of a socket that listens."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/"


def serve(
    app: ASGIApp,
    listener: socket.socket,
    *,
    seconds_to_finish: int,
    most_connections: int | None = None,
) -> None:
    """Answer until Ctrl-C; requests that have begun then have ``seconds_to_finish``."""
    config = uvicorn.Config(
        app,
        http=PromptProtocol,
        log_level="warning",
        access_log=False,
        log_config=None if json_lines.is_on() else uvicorn.config.LOGGING_CONFIG,
        server_header=False,
        limit_concurrency=most_connections,
        timeout_graceful_shutdown=seconds_to_finish,
    )
    uvicorn.Server(config).run(sockets=[listener])
