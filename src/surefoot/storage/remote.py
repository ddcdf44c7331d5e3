"""What is on other machines: folders in object stores, and hubs of models and datasets.

A folder in an object store has an address such as ``s3://bucket/run``: text with ``://`` is an
address, all other text is a path. Plugins reach hubs and stores. What all that download from a
server share is here: whether the network may be used, the lock of a folder, the hash of a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from ..errors import SurefootError
from ..extensions import Extended
from ..log import announced
from . import files

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SLUG = 60  # characters of a readable name


class Address(str):
    """A URL without a trailing slash. ``str`` returns it unchanged."""

    __slots__ = ()

    def __new__(cls, text: str) -> Address:
        """Parse ``text``; ``ValueError`` if it is not a URL, or has no bucket or folder."""
        if not is_address(text):
            raise ValueError(f"{text!r} is not a URL; expected for example s3://bucket/run")
        scheme, _, rest = text.partition("://")
        parts = rest.rstrip("/").split("/")
        if not rest.strip("/"):
            raise ValueError(f"{text!r} has no folder; expected for example s3://bucket/run")
        if any(part in (".", "..") for part in parts):
            raise ValueError(f"{text!r}: a URL cannot contain '.' or '..'")
        return super().__new__(cls, f"{scheme.lower()}://{'/'.join(parts)}")

    @property
    def scheme(self) -> str:
        """The part before ``://``, in lower case."""
        return self.partition("://")[0]

    @property
    def name(self) -> str:
        """The last part."""
        return self.rpartition("/")[2]

    @property
    def parent(self) -> Address:
        """The parent folder; ``ValueError`` if there is none."""
        return Address(self.rpartition("/")[0])

    def inside(self, name: str) -> Address:
        """The address of ``name`` in this folder."""
        return Address(f"{self}/{name}")

    @property
    def slug(self) -> str:
        """A unique file name for it: a readable part and a hash."""
        # The hash tells addresses apart whose readable parts are equal, such as a/b and a-b.
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", self.partition("://")[2]).strip("-.")
        digest = hashlib.sha256(self.encode()).hexdigest()[:12]
        return f"{readable[-_SLUG:].lstrip('-.')}-{digest}"

    @classmethod
    def __get_pydantic_core_schema__(
        cls, _source: Any, _handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Expect a text with ``://``."""
        return core_schema.no_info_after_validator_function(
            cls, core_schema.str_schema(pattern=f"^{_ADDRESS.pattern}")
        )


def is_address(text: str | Path) -> bool:
    """Whether ``text`` is a URL, not a path."""
    return isinstance(text, str) and _ADDRESS.match(text) is not None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def default_cache() -> Path:
    """The default cache, ``surefoot/runs`` in ``XDG_CACHE_HOME`` or ``~/.cache``. Raises
    ``SurefootError`` where there is neither."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path in this variable must be ignored (XDG Base Directory Specification).
    if root.startswith("/"):
        return Path(root) / "surefoot" / "runs"
    try:
        return Path.home() / ".cache" / "surefoot" / "runs"
    except RuntimeError:  # such as a container's user id without a name, and no HOME
        raise SurefootError(
            "this user has no home folder for the cache: HOME is not set, and user id "
            f"{os.getuid()} has no entry in the list of users; set XDG_CACHE_HOME to a folder"
        ) from None


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


MODELSCOPE, OPENMIND = "USE_MODELSCOPE_HUB", "USE_OPENMIND_HUB"  # switches of LLaMA-Factory


def is_switched_on(name: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a switch of the environment is on, in the words of LLaMA-Factory."""
    return environment.get(name, "0").lower() in ("true", "y", "1", "yes")


def offline_setting(environment: Mapping[str, str] = os.environ) -> str | None:
    """The variable that forbids the network, if one is set."""
    for name in OFFLINE:
        if environment.get(name, "").strip().lower() in ("1", "true", "yes", "on"):
            return name
    return None


DOWNLOAD = "or run `surefoot download RECIPE` on a machine with a network, and copy what it prints"


def check_online(what: str) -> None:
    """Raises ``HubError`` if a variable forbids the network."""
    if (name := offline_setting()) is not None:
        raise HubError(
            f"{what} is not on this machine, and {name} is set; unset {name}, {DOWNLOAD}"
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
    with files.open_stream(path) as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
