"""OpenAI: a list of messages per row, with function calls in ``tool_calls``; nothing is added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...example import Example
from .fields import Row
from .turns import read_turns


@dataclass(frozen=True, kw_only=True)
class OpenAI:
    """``{"messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}], "tools"}``."""

    main: ClassVar[str] = "messages"

    messages: str | None = "messages"
    """The messages."""
    system: str | None = "system"
    """The system message, if it is not the first message."""
    tools: str | None = "tools"
    """Functions the model may call: a list of schemas, or the same as a JSON string."""
    chosen: str | None = "chosen"
    """The chosen response, with ``ranking``: a message or its text."""
    rejected: str | None = "rejected"
    """The rejected response, with ``ranking``: a message or its text."""
    kto_tag: str | None = None
    """Whether the last response is desirable, true or false."""
    role_tag: str = "role"
    """Key of a message's role."""
    content_tag: str = "content"
    """Key of a message's content."""
    user_tag: str = "user"
    """Role of the user."""
    assistant_tag: str = "assistant"
    """Role of the model."""
    observation_tag: str = "tool"
    """Role of a function's result; ``function``, its older name, is read too."""
    function_tag: str = "function_call"
    """Role of a function call as a message of its own, for files that have such messages."""
    system_tag: str = "system"
    """Role of the system message; ``developer``, its newer name, is read too."""
    ranking: bool = False
    """Each row has a chosen and a rejected last response."""

    def read(self, row: Row) -> Example:
        """The row's conversation; raises DataError with the reason if it has none."""
        return read_turns(self, row, {"developer": "system", "function": "tool"})
