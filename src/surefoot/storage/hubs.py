"""Hubs, which plugins reach, and what all that download from a server share."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from ..errors import SurefootError
from ..extensions import Extended
from ..log import announced
from . import files

Kind = Literal["models", "datasets"]
CHUNK = 1 << 20  # bytes that are read at a time
LOCK = ".surefoot.lock"
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_OTHER = (
    "another process that downloads the same, until it is done or ends; it holds %s (`fuser` shows "
    "its number)"
)


class HubError(SurefootError):
    """A file cannot be downloaded, or is not the one that its server announces."""


class HubClient(Protocol):
    """Where models and datasets have ids such as ``Qwen/Qwen3-0.6B``."""

    def snapshot(
        self,
        kind: Kind,
        name: str,
        *,
        revision: str | None = None,
        patterns: Sequence[str] = ("*",),
        ignored: Sequence[str] = (),
    ) -> Path:
        """The local folder with the files that match ``patterns``, each verified. Raises
        ``HubError``: it does not exist, cannot be reached, or arrives damaged."""


HUBS: Extended[HubClient] = Extended("hubs", {})


def is_repository_name(name: str) -> bool:
    """Whether ``name`` has the form owner/name."""
    return _NAME.fullmatch(name) is not None


def offline_setting(environment: Mapping[str, str] = os.environ) -> str | None:
    """The variable that forbids the network, if one is set."""
    for name in OFFLINE:
        if environment.get(name, "").strip().lower() in ("1", "true", "yes", "on"):
            return name
    return None


def check_online(what: str) -> None:
    """Raises ``HubError`` if a variable forbids the network."""
    if (name := offline_setting()) is not None:
        raise HubError(
            f"{what} is not on this machine, and {name} is set; unset {name}, or download it on a "
            "machine with a network"
        )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create ``folder``, and wait until no other process downloads to it. Raises ``HubError``."""
    with files.raising(HubError, f"cannot write to {folder}"):
        files.make_folder(folder)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with announced(_OTHER, folder / LOCK), contextlib.suppress(OSError):  # one without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def digest_of(path: Path, kind: str = "sha256", head: bytes = b"") -> str:
    """The hash of ``head`` and of a file's bytes."""
    digest = hashlib.new(kind, head)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
