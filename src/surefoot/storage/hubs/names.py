"""Names of repositories on a hub."""

from __future__ import annotations

import re

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_repository_name(name: str) -> bool:
    """Whether ``name`` has the form owner/name."""
    return _NAME.fullmatch(name) is not None
