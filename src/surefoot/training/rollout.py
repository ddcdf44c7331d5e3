"""Rollouts: what the policy said to a prompt, as token ids from beginning to end.

Everything that is trained on or rewarded is read from these ids; nothing is tokenized again, so
that no token differs from the one that was sampled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..batch import IGNORE_INDEX, Features
from ..data.example import Dropped, Encoded, Example, Truncated

if TYPE_CHECKING:
    from ..data.text.codec import Codec

StopReason = Literal["stop", "length", "context"]


@dataclass(frozen=True)
class DatasetRow:
    """The row of a dataset that a prompt is made of."""

    columns: Mapping[str, object]
    origin: str = ""  # for messages


@dataclass(frozen=True)
class Rollout:
    """A prompt and what followed: one response, or several turns with an environment."""

    ids: tuple[int, ...]  # of prompt, responses and what the environment said between them
    is_sampled: tuple[bool, ...]  # which of them the policy has sampled
    logps: tuple[float, ...]  # as sampled, at ``temperature``; 0 of what is not sampled
    num_prompt: int  # tokens that were there first
    temperature: float
    stop_reason: StopReason
    group: int  # the prompt, counted in its window
    row: DatasetRow
    version: int | None = None  # optimizer steps behind the weights, if that is known

    @property
    def prompt(self) -> tuple[int, ...]:
        """The ids that were there first."""
        return self.ids[: self.num_prompt]

    @property
    def completion(self) -> tuple[int, ...]:
        """All ids after them."""
        return self.ids[self.num_prompt :]

    @property
    def num_sampled(self) -> int:
        """Sampled tokens."""
        return sum(self.is_sampled)

    @property
    def is_cut(self) -> bool:
        """Whether the last response did not end by itself."""
        return self.stop_reason != "stop"

    @property
    def sampled_logps(self) -> list[float]:
        """Of the sampled tokens alone."""
        return [logp for logp, is_own in zip(self.logps, self.is_sampled, strict=True) if is_own]

    def features(self, advantages: Sequence[float] | float) -> Features:
        """To be trained on, with the advantage of each sampled token, or of all; the ``lengths`` of
        prompt and completion let a packed row share the prompt."""
        pairs = zip(self.ids, self.is_sampled, strict=True)
        if isinstance(advantages, float):
            advantages = [advantages] * self.num_sampled
        return {
            "input_ids": list(self.ids),
            "labels": [token if is_own else IGNORE_INDEX for token, is_own in pairs],
            "advantages": list(advantages),  # type: ignore[arg-type]
            "lengths": [self.num_prompt, len(self.ids) - self.num_prompt],
        }


@dataclass(frozen=True)
class Event:
    """What the policy said in a conversation."""

    session: int  # the conversation, counted in its window
    row: DatasetRow
    response: str | None  # None: it was cut off, and nothing is to be said to it
    is_first: bool


def encode_prompts(examples: Sequence[Example], codec: Codec) -> list[Encoded]:
    """The prompt of each example, up to its last response, and its row for the reward."""
    pairs = zip(examples, codec.encode_prompts(examples), strict=True)
    return [_with_row(outcome, example) for example, outcome in pairs]


def _with_row(outcome: Encoded, example: Example) -> Encoded:
    """An encoded prompt with its row, as bytes."""
    if isinstance(outcome, Dropped | Truncated):
        return outcome
    columns = json.dumps(example.columns, default=str).encode()
    return [{**item, "row": columns, "origin": example.origin.encode()} for item in outcome]


def read_row(item: Features) -> DatasetRow:
    """The row of an encoded prompt."""
    return DatasetRow(json.loads(_bytes(item, "row")), _bytes(item, "origin").decode())


def _bytes(item: Features, name: str) -> bytes:
    return bytes(int(value) for value in item.get(name, ()))
