"""Names that a server is reached by: what the ``Host`` of a request may be.

DNS rebinding needs a name that an attacker owns: his page is opened by it, and then it resolves to
this machine. So names are limited to this machine's, and those that are given at the start. An
address in figures cannot be rebound. Where others reach the server, it may be that of a container's
host or of a gateway, which this machine does not know; so each is accepted there.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ..errors import RunError

_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_MAX_NAME = 253  # characters, as in DNS


@dataclass(frozen=True)
class Hosts:
    """Names of a server. Of one on this machine's own address: that, and what is ``given``."""

    given: frozenset[str] = frozenset()
    is_reached: bool = False  # by other machines
    machine: set[str] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        """Whether others than the users of this machine can send requests."""
        return self.is_reached or any(not is_loopback(name) for name in self.given)

    def refusal(self, values: Iterable[str], what: str) -> str | None:
        """Why a request with these values of ``Host`` is not for the server, a ``what``."""
        values = list(values)
        name = host_name(values[0]) if len(values) == 1 else ""
        if (
            is_loopback(name)
            or name in self.given
            or (self.is_reached and self._is_of_machine(name))
        ):
            return None
        if not _is_name(name):
            shown = ", ".join(values)[:100]
            return f"Host: expected the name or address of this {what}, got {shown!r}"
        return (
            f"this {what} does not answer under the name {name}. If that is right, "
            f"start it with --host-name {name}"
        )

    def _is_of_machine(self, name: str) -> bool:
        return name in self.machine or _is_address(name)


def hosts_of(listening: str, given: Iterable[str] = ()) -> Hosts:
    """The names of a server that listens at an address. Raises ``RunError`` for a ``given`` one
    that is no name."""
    names = frozenset(map(_checked, given))
    if is_loopback(listening):
        return Hosts(names)
    full = socket.gethostname().lower() or "localhost"
    short = full.partition(".")[0]
    machine = {listening.lower(), full, short, f"{short}.local"}
    # the full name may need a name server that does not answer: the start does not wait for it
    threading.Thread(target=lambda: machine.add(socket.getfqdn().lower()), daemon=True).start()
    return Hosts(names, True, machine)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_name(host: str) -> str:
    """``Host`` without its port and without the dot that may end a name; empty if it is neither."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises, if it is none
    except ValueError:
        return ""
    is_plain = not (parts.path or parts.query or parts.fragment or "@" in host)
    return (parts.hostname or "").removesuffix(".") if is_plain else ""


def _checked(given: str) -> str:
    name = given.lower().strip("[]").removesuffix(".")
    if not (_is_name(name) or _is_address(name)):
        raise RunError(
            f"--host-name: expected a name without scheme and port, such as gpu-7.example.org, "
            f"got {given!r}"
        )
    return name


def _is_name(text: str) -> bool:
    return len(text) <= _MAX_NAME and bool(_NAME.fullmatch(text))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
