"""OpenAI: a list of messages per row, with function calls in ``tool_calls``; nothing is added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...example import Role
from .turns import TurnFormat


@dataclass(frozen=True, kw_only=True)
class OpenAI(TurnFormat):
    """``{"messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}], "tools"}``."""

    more_roles: ClassVar[Mapping[str, Role]] = {"developer": "system", "function": "tool"}

    observation_tag: str = "tool"
    """Role of a function's result; ``function``, its older name, is read too."""
    system_tag: str = "system"
    """Role of the system message; ``developer``, its newer name, is read too."""
