"""ShareGPT: a list of turns per row, with function calls as turns of their own."""

from __future__ import annotations

from dataclasses import dataclass

from .turns import TurnFormat


@dataclass(frozen=True, kw_only=True)
class ShareGPT(TurnFormat):
    """``{"conversations": [{"from": "human", "value": ...}, ...], "system", "tools"}``."""

    messages: str | None = "conversations"
    """The turns."""
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
