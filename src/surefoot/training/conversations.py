"""Conversations of the policy with an environment, a user's class that answers its responses; and
whether what was sampled in them is what is trained.

Every turn continues the very ids before it: a response is never rendered or tokenized again. The
chat template renders what the environment says, after a response's end token.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from ..data.example import Message
from ..generate.section import GenerateSection
from ..generate.servers import Sampler
from ..schema.locations import FunctionPath
from .rollout import DatasetRow, Event, Rollout, StopReason
from .stage import StageContext

if TYPE_CHECKING:
    from ..data.text.codec import Codec
    from ..generate.generation import Sample


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

    number: int  # in the window
    row: DatasetRow
    group: int
    prompt: Sequence[int]
    ids: list[int] = field(default_factory=list)  # after the prompt
    is_sampled: list[bool] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    reason: StopReason = "length"
    version: int | None = None
    is_over: bool = False

    def add_response(self, sample: Sample, tokens_left: int) -> Sample:
        """Add a response, or as much of it as there are tokens left; what was added."""
        added = sample
        if len(sample.ids) > tokens_left:
            added = replace(
                sample,
                ids=sample.ids[:tokens_left],
                logps=sample.logps[:tokens_left],
                finish_reason="length",
            )
        self.ids += added.ids
        self.logps.extend(map(float, added.logps))
        self.is_sampled += [True] * len(added.ids)
        self.reason, self.version = added.finish_reason, added.version
        return added

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
    conversations = [
        _Conversation(number, row, group, prompt)
        for number, (prompt, row, group) in enumerate(prompts)
    ]
    max_tokens = settings.max_new_tokens
    for turn in range(max_turns):
        ongoing = [each for each in conversations if not each.is_over]
        if not ongoing:
            break
        histories = [[*each.prompt, *each.ids] for each in ongoing]
        tokens_left = [max_tokens - len(each.ids) for each in ongoing]
        # one limit for the batch: a response to a longer history is cut when it is added
        limited = replace(settings, max_new_tokens=max(tokens_left))
        samples = context.generate(histories, limited, turn=turn)
        responses = [
            (conversation, conversation.add_response(sample, count))
            for conversation, sample, count in zip(ongoing, samples, tokens_left, strict=True)
        ]
        is_last = turn + 1 == max_turns
        if environment is not None:
            _answer(context, responses, environment, max_tokens, is_first=not turn, is_last=is_last)
    return [each.rollout(settings.temperature) for each in conversations]


def _answer(
    context: StageContext,
    responses: Sequence[tuple[_Conversation, Sample]],
    environment: Environment,
    max_tokens: int,
    *,
    is_first: bool,
    is_last: bool,
) -> None:
    """Add what the environment says to each conversation, or end it."""
    codec, decode = context.codec, context.codec.tokenizer.decode
    events = []
    for conversation, sample in responses:
        conversation.is_over = True
        is_complete = sample.finish_reason == "stop"
        if is_complete or is_first:
            text = decode(list(sample.text_ids)) if is_complete else None
            event = Event(conversation.number, conversation.row, text, is_first)
            events.append((conversation, sample, event))
    replies = environment.step(context, [event for _, _, event in events])
    for (conversation, sample, _), message in zip(events, replies, strict=True):
        if message is None or is_last:
            continue
        next_turn = _next(codec, sample, message)
        if next_turn is None or len(conversation.ids) + len(next_turn) >= max_tokens:
            conversation.reason = "length" if next_turn is not None else conversation.reason
            continue
        conversation.add_reply(next_turn)
        conversation.is_over = False


def _next(codec: Codec, sample: Sample, message: Message) -> list[int] | None:
    """What follows the end of a response; None if another token ended it than ends a turn."""
    turn = codec.encode_turn(message)
    return turn.ids if sample.ids[-1] == turn.follows else None


logger = logging.getLogger(__name__)
MEAN = 0.05  # nats; bfloat16 has 0.001 to 0.01, float32 0.000001
_FAR = 0.02  # nats; more at a token is more than rounding
_FEW = 0.2  # of all tokens
_MOST = 16  # rollouts; they cost one forward pass more


def sampling_figures(
    context: StageContext, policy: str, rollouts: Sequence[Rollout], sampler: Sampler
) -> Mapping[str, float]:
    """How far the log-probabilities as sampled are from those of the model of role ``policy``, for
    metrics. Logs a warning where they differ by more than rounding."""
    answered = [rollout for rollout in rollouts if rollout.num_sampled]
    chosen = answered[:: -(-len(answered) // _MOST)] if answered else []
    examples = [rollout.features(0.0) for rollout in chosen]
    outputs = context.compute(policy, examples) if chosen else []
    trained = [logp for each in outputs if each.logps is not None for logp in each.logps.tolist()]
    return gap_figures(chosen, trained, sampler)


def gap_figures(
    rollouts: Sequence[Rollout], trained: Sequence[float], sampler: Sampler
) -> Mapping[str, float]:
    """The same of rollouts whose log-probabilities are ``trained``, one after the other."""
    if not rollouts:
        return {}
    gap = mismatch([logp for rollout in rollouts for logp in rollout.sampled_logps], trained)
    server, is_scaled = sampler.server, rollouts[0].temperature != 1
    cure = server.on_other_temperature if server is not None and is_scaled else ""
    warn_of(gap, cure)
    return gap.figures


@dataclass(frozen=True)
class Mismatch:
    """The difference at each token, sampled minus trained."""

    differences: Sequence[float]

    @property
    def figures(self) -> Mapping[str, float]:
        """The mean and largest distance in nats, and the KL divergence of the trained policy from
        the sampled one, which is estimated by r - 1 - log r (http://joschu.net/blog/kl-approx.html)
        with r the ratio of trained to sampled probability."""
        count, distances = len(self.differences), [abs(each) for each in self.differences]
        # not beyond what a float holds
        terms = [math.expm1(min(-each, 700.0)) + each for each in self.differences]
        return {
            "sampling_gap": sum(distances) / count,
            "sampling_gap_max": max(distances),
            "sampling_kl": sum(terms) / count,
        }

    @property
    def cause(self) -> str | None:
        """What is likely wrong, or None if nothing is."""
        if not all(map(math.isfinite, self.differences)):
            return "a log-probability is not finite"
        if self.figures["sampling_gap"] <= MEAN:
            return None
        share = sum(abs(each) > _FAR for each in self.differences) / len(self.differences)
        if share <= _FEW:
            return (
                f"few tokens differ ({share:.0%}), as where experts are chosen otherwise, or where "
                "few bits round improbable tokens; train.precision: fp32 would show which"
            )
        return (
            f"most tokens differ ({share:.0%}), as if they were sampled with other weights, "
            "without the adapter, at another temperature, or after another prompt"
        )


def mismatch(sampled: Sequence[float], trained: Sequence[float]) -> Mismatch:
    """Of log-probabilities of the same tokens, as sampled and as trained, at least one."""
    pairs = zip(sampled, trained, strict=True)
    return Mismatch([sampled_logp - trained_logp for sampled_logp, trained_logp in pairs])


def warn_of(gap: Mismatch, cure: str = "") -> None:
    """Log a warning, and perhaps what to do, if the responses may not be the policy's own."""
    if (cause := gap.cause) is not None:
        figures = gap.figures
        logger.warning(
            "the log-probabilities of the responses as sampled and as trained differ by %.3g nats "
            "on average (at most %.3g): %s. Gradients are those of other responses than the "
            "policy's own%s",
            figures["sampling_gap"],
            figures["sampling_gap_max"],
            cause,
            f"; {cure}" if cure else "",
        )


# Of the metrics made here, whether greater ones are better.
SAMPLED = {"reward": True, "rewards/*": True, "kl": False, "completions_clipped": False}


def window_figures(
    rewards: Sequence[float], rollouts: Sequence[Rollout], **more: float
) -> dict[str, float]:
    """The metrics of a window: of the rewards that there are, ``more``, and of all responses."""
    mean = math.fsum(rewards) / max(1, len(rewards))
    spread = math.fsum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1)
    return {
        "reward": mean,
        "reward_std": math.sqrt(spread),
        **more,
        "completion_length": sum(rollout.num_sampled for rollout in rollouts) / len(rollouts),
        "completions_clipped": sum(rollout.is_cut for rollout in rollouts) / len(rollouts),
    }
