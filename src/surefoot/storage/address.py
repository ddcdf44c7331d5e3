"""Address of a folder in an object store, ``s3://bucket/run``: text with named parts.

Text with ``://`` is an address; all other text is a path.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

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


def default_cache() -> Path:
    """The default cache, ``surefoot/runs`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root.startswith("/") else Path.home() / ".cache") / "surefoot" / "runs"
