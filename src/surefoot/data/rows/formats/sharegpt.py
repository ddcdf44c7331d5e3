"""ShareGPT: a list of turns per row, with function calls as turns of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...example import Example
from .fields import Row
from .turns import read_turns


@dataclass(frozen=True, kw_only=True)
class ShareGPT:
    """``{"conversations": [{"from": "human", "value": ...}, ...], "system", "tools"}``."""

    main: ClassVar[str] = "messages"

    messages: str | None = "conversations"
    """The turns."""
    system: str | None = "system"
    """The system message, if it is not the first turn."""
    tools: str | None = "tools"
    """Functions the model may call: a list of schemas, or the same as a JSON string."""
    chosen: str | None = "chosen"
    """The chosen response, with ``ranking``: a turn or its text."""
    rejected: str | None = "rejected"
    """The rejected response, with ``ranking``: a turn or its text."""
    kto_tag: str | None = None
    """Whether the last response is desirable, true or false."""
    role_tag: str = "from"
    """Key of a turn's role."""
    content_tag: str = "value"
    """Key of a turn's content."""
    user_tag: str = "human"
    """Role of the user."""
    assistant_tag: str = "gpt"
    """Role of the model."""
    observation_tag: str = "observation"
    """Role of a function's result."""
    function_tag: str = "function_call"
    """Role of a function call: JSON with name and arguments, or a list of such."""
    system_tag: str = "system"
    """Role of the system message."""
    ranking: bool = False
    """Each row has a chosen and a rejected last response."""

    def read(self, row: Row) -> Example:
        """The row's conversation; raises DataError with the reason if it has none."""
        return read_turns(self, row, {})
