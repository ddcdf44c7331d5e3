"""The Ray cluster of a command, which more than one plugin joins."""

from __future__ import annotations

import logging
import os
import socket

import ray

from ..errors import RunError, first_line

_SECONDS = 10.0  # for the address to answer


def join(address: str, advice: str, *, log_to_driver: bool = True) -> None:
    """Join the cluster at ``address``: ``HOST:PORT``; ``auto``, which is ``RAY_ADDRESS`` or the one
    of this machine; or ``local``, a new one. Raises ``RunError`` with ``advice``: there is none."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
    try:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        # Ray itself goes on trying for a quarter of an hour.
        if port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), _SECONDS).close()
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=log_to_driver)
    except (OSError, ValueError, OverflowError) as error:
        raise RunError(f"no Ray cluster at {address} ({first_line(error)}); {advice}") from error
