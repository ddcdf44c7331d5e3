"""OpenAI: a list of messages per row, with function calls in ``tool_calls``; nothing is added."""

from __future__ import annotations

from dataclasses import dataclass

from ...example import Example
from .fields import Row
from .turns import TurnFormat, read_turns


@dataclass(frozen=True, kw_only=True)
class OpenAI(TurnFormat):
    """``{"messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}], "tools"}``."""

    observation_tag: str = "tool"
    """Role of a function's result; ``function``, its older name, is read too."""
    system_tag: str = "system"
    """Role of the system message; ``developer``, its newer name, is read too."""

    def read(self, row: Row) -> Example:
        """The row's conversation; raises DataError with the reason if it has none."""
        return read_turns(self, row, {"developer": "system", "function": "tool"})
