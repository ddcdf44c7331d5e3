"""Keep secrets out of what is logged, and out of the settings that a tracker shows."""

from __future__ import annotations

import os
import re

_USERINFO = re.compile(r"(?<=://)[^/\s@'\"]+@")
_QUERY = re.compile(
    r"([?&][^=&\s'\"]*(?:key|token|secret|password|sig|auth)[^=&\s'\"]*=)[^&\s'\"]+", re.I
)
_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|WEBHOOK|CREDENTIAL", re.I)
_SHORTEST = 8  # characters of a value that cannot be an ordinary word of a message


def redacted(text: str) -> str:
    """``text`` without the values of environment variables that are named like secrets, and
    without names, passwords and keys in URLs."""
    secrets = {value for name, value in os.environ.items() if _NAMES.search(name)}
    for secret in sorted((s for s in secrets if len(s) >= _SHORTEST), key=len, reverse=True):
        text = text.replace(secret, "***")
    return _QUERY.sub(r"\1***", _USERINFO.sub("***@", text))
