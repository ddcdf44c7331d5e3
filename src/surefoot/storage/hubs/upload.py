"""What an upload to a hub consists of: files here, and files there."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

from .file_download import HubError, digest_of

SMALL = 16 << 20  # bytes; hubs keep larger files out of git, and announce their sha256 only


class LostConnectionError(HubError):
    """An upload was interrupted; the same call continues it."""


@dataclass(frozen=True)
class LocalFile:
    """A file to upload, under a name of its own. ``source`` is a path, or the bytes."""

    path: str
    source: Path | bytes

    @cached_property
    def size(self) -> int:
        """Length in bytes."""
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size

    @cached_property
    def sha256(self) -> str:
        """The hash by which hubs know large files."""
        if isinstance(self.source, bytes):
            return hashlib.sha256(self.source).hexdigest()
        return digest_of(self.source)

    @cached_property
    def git(self) -> str:
        """The hash by which git knows a small file; empty for a large one."""
        if self.size > SMALL:
            return ""
        head = f"blob {self.size}\0".encode()
        return hashlib.sha1(head + self.read()).hexdigest()

    def open(self) -> IO[bytes]:
        """The bytes, to be read."""
        return io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source.open("rb")

    def read(self) -> bytes:
        """All bytes."""
        with self.open() as file:
            return file.read()


@dataclass(frozen=True)
class RemoteEntry:
    """A file of a repository. One of the hashes is known."""

    size: int
    sha256: str = ""
    git: str = ""

    def is_same(self, sha256: str, git: str) -> bool:
        """Whether the file has these hashes."""
        return self.sha256 == sha256 if self.sha256 else bool(git) and self.git == git


@dataclass(frozen=True)
class Repository:
    """A repository of a hub as it is now."""

    is_private: bool
    commit: str
    files: Mapping[str, RemoteEntry]
