"""Start the server, and say where it is."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

import uvicorn

from ..board.host_names import hosts_of
from ..board.server import PromptProtocol, address_of, bound
from .app import create_app
from .running.settings import ServeSettings


def serve(
    settings: ServeSettings,
    host: str,
    port: int,
    *,
    host_names: Sequence[str] = (),
    seconds_to_finish: int,
    announce: Callable[[str, str | None], None],
) -> None:
    """Serve until Ctrl-C; requests that have begun then have ``seconds_to_finish``. ``announce``
    gets the address and the key. Raises ``RunError`` if the address cannot be used."""
    hosts = hosts_of(host, host_names)
    key = settings.api_key or (secrets.token_urlsafe(24) if hosts.is_open else None)
    settings = replace(settings, hosts=hosts, api_key=key)
    with contextlib.closing(bound(host, port, "server")) as listener:
        app = create_app(settings)
        announce(address_of(host, listener), settings.api_key)
        config = uvicorn.Config(
            app,
            http=PromptProtocol,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=seconds_to_finish,
        )
        uvicorn.Server(config).run(sockets=[listener])
