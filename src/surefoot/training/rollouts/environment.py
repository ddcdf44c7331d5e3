"""Conversations of the policy with an environment: a user's class answers its responses.

Every turn continues the very ids before it: a response is never rendered or tokenized again. The
chat template renders what the environment says, after a response's end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from ...data.example import Message
from ...generate.section import GenerateSection
from ...schema.locations import FunctionPath
from ..stage import StageContext
from .rollout import DatasetRow, Event, Rollout, StopReason

if TYPE_CHECKING:
    from ...data.text.codec import Codec
    from ...generate.generation import Sample


class Environment(Protocol):
    """What answers the policy. A stage without one has conversations of one turn."""

    def step(self, context: StageContext, events: Sequence[Event]) -> list[Message | None]:
        """What it says to each response; None ends the conversation."""


@dataclass(frozen=True)
class UserEnvironment:
    """A class in a user's file: ``Class(row)`` begins a conversation, ``step(response)`` answers
    with text, a message or None. It lives in the process of rewards."""

    path: FunctionPath
    seconds: float

    def step(self, context: StageContext, events: Sequence[Event]) -> list[Message | None]:
        """What each object says."""
        return context.environment(self.path, events, self.seconds)


@dataclass
class _Conversation:
    """One of a window."""

    row: DatasetRow
    group: int
    prompt: Sequence[int]
    ids: list[int] = field(default_factory=list)  # after the prompt
    is_sampled: list[bool] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    reason: StopReason = "length"
    version: int | None = None
    is_over: bool = False

    def add_response(self, sample: Sample, left: int) -> Sample:
        """Add a response, or as much of it as there are tokens left; what was added."""
        kept = sample
        if len(sample.ids) > left:
            kept = replace(
                sample, ids=sample.ids[:left], logps=sample.logps[:left], finish_reason="length"
            )
        self.ids += kept.ids
        self.logps.extend(map(float, kept.logps))
        self.is_sampled += [True] * len(kept.ids)
        self.reason, self.version = kept.finish_reason, kept.version
        return kept

    def add_reply(self, ids: Sequence[int]) -> None:
        """Add what the environment says."""
        self.ids += ids
        self.logps += [0.0] * len(ids)
        self.is_sampled += [False] * len(ids)

    def rollout(self, temperature: float) -> Rollout:
        """All of it."""
        before = len(self.prompt)
        return Rollout(
            ids=(*self.prompt, *self.ids),
            is_sampled=(*(False,) * before, *self.is_sampled),
            logps=(*(0.0,) * before, *self.logps),
            num_prompt=before,
            temperature=temperature,
            stop_reason=self.reason,
            group=self.group,
            row=self.row,
            version=self.version,
        )


def converse(
    context: StageContext,
    prompts: Sequence[tuple[Sequence[int], DatasetRow, int]],
    settings: GenerateSection,
    environment: Environment | None = None,
    max_turns: int = 1,
) -> list[Rollout]:
    """One conversation for each prompt, which has a row and a group, of at most
    ``settings.max_new_tokens`` tokens after the prompt; without an environment it has one turn."""
    every = [_Conversation(row, group, prompt) for prompt, row, group in prompts]
    most = settings.max_new_tokens
    for turn in range(max_turns):
        open_ones = [(n, one) for n, one in enumerate(every) if not one.is_over]
        if not open_ones:
            break
        left = [most - len(one.ids) for _, one in open_ones]
        given = [[*one.prompt, *one.ids] for _, one in open_ones]
        samples = context.generate(given, replace(settings, max_new_tokens=max(left)), turn=turn)
        heard = zip(open_ones, samples, left, strict=True)
        said = [(n, one, one.add_response(sample, count)) for (n, one), sample, count in heard]
        is_last = turn + 1 == max_turns
        if environment is not None:
            _answer(context, said, environment, most, is_first=not turn, is_last=is_last)
    return [one.rollout(settings.temperature) for one in every]


def _answer(
    context: StageContext,
    said: Sequence[tuple[int, _Conversation, Sample]],
    environment: Environment,
    most: int,
    *,
    is_first: bool,
    is_last: bool,
) -> None:
    """Add what the environment says to each conversation, or end it."""
    codec, decode = context.codec, context.codec.tokenizer.decode
    events = []
    for n, one, sample in said:
        one.is_over = True
        is_complete = sample.finish_reason == "stop"
        if is_complete or is_first:
            text = decode(list(sample.text_ids)) if is_complete else None
            events.append((one, sample, Event(n, one.row, text, is_first)))
    replies = environment.step(context, [event for _, _, event in events])
    for (one, sample, _), message in zip(events, replies, strict=True):
        if message is None or is_last:
            continue
        next_turn = _next(codec, sample, message)
        if next_turn is None or len(one.ids) + len(next_turn) >= most:
            one.reason = "length" if next_turn is not None else one.reason
            continue
        one.add_reply(next_turn)
        one.is_over = False


def _next(codec: Codec, sample: Sample, message: Message) -> list[int] | None:
    """What follows the end of a response; None if another token ended it than ends a turn."""
    turn = codec.encode_turn(message)
    return turn.ids if sample.ids[-1] == turn.follows else None
