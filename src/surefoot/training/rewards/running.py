"""Rewards and environments of a user's, computed on rank 0; every rank gets the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from ...data.example import Message
from ...data.text.codec import Codec
from ...errors import RunError
from ...parallel.world import World
from ...schema.locations import FunctionPath
from ..rollouts.rollout import Event, Rollout
from .process import RewardProcess, RewardResult, RewardTask, Texts, short
from .reward import OnError, computed

T = TypeVar("T")


@dataclass(frozen=True)
class RewardRunner:
    """What computes them."""

    process: RewardProcess
    codec: Codec
    world: World

    def compute(
        self, task: RewardTask, rollouts: Sequence[Rollout], seconds: float, on_error: OnError
    ) -> RewardResult:
        """The rewards of a window's rollouts. Raises ``RunError``."""

        def compute() -> RewardResult:
            return computed(self.process, task, self._texts(rollouts), seconds, on_error)

        return self._on_main(compute)

    def step(
        self, path: FunctionPath, events: Sequence[Event], seconds: float
    ) -> list[Message | None]:
        """What the environment says to each response. Raises ``RunError``."""
        return self._on_main(lambda: stepped(self.process, path, events, seconds))

    def _texts(self, rollouts: Sequence[Rollout]) -> Texts:
        decode = self.codec.tokenizer.decode
        names = dict.fromkeys(name for one in rollouts for name in one.row.columns)
        return Texts(
            [decode(list(one.prompt)) for one in rollouts],
            [decode(list(one.completion), skip_special_tokens=True) for one in rollouts],
            [one.num_sampled for one in rollouts],
            {name: [one.row.columns.get(name) for one in rollouts] for name in names},
            [one.row.origin for one in rollouts] if all(r.row.origin for r in rollouts) else (),
            [one.completion for one in rollouts],
        )

    def _on_main(self, compute: Callable[[], T]) -> T:
        """The result of rank 0, or its error, on every rank."""
        found: list[T] = []
        self.world.on_main(lambda: found.append(compute()))
        result: T = self.world.from_main(found[0] if found else None)
        return result


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
    if "error" not in found:
        return [None if one is None else _message(**one) for one in found["replies"]]
    where = ""
    if (at := found.get("place")) is not None:
        where = f" {events[at].row.origin} (response {short(events[at].response or '')}):"
    raise RunError(f"{path}:{where} {found['error']}")


def _message(role: Literal["user", "tool"], content: str, **fields: str) -> Message:
    return Message(role, content, fields=fields)
