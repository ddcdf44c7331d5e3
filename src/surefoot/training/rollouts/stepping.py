"""One step of a user's environment, in the process of rewards."""

from __future__ import annotations

from collections.abc import Sequence

from ...data.example import Message
from ...errors import RunError
from ...schema.locations import FunctionPath
from ..rewards.process import RewardProcess, short
from .environment import Event


def stepped(
    process: RewardProcess, path: FunctionPath, events: Sequence[Event], seconds: float
) -> list[Message | None]:
    """What the environment says to each response. Raises ``RunError``, which names the row."""
    given = [
        {
            "session": event.session,
            "row": dict(event.row.columns) if event.is_first else None,
            "response": event.response,
            "is_first": event.is_first,
        }
        for event in events
    ]
    found = process.step(str(path), given, seconds)
    if "error" in found:
        at = found.get("place")
        named = (
            f" {events[at].row.origin} (response {short(events[at].response)}):"
            if at is not None
            else ""
        )
        raise RunError(f"{path}:{named} {found['error']}")
    return [None if one is None else Message(**one) for one in found["replies"]]
