"""The ``Reward`` protocol, the sum of several, and what the process of rewards says of a window."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from ...data.example import Message
from ...errors import RunError, counted
from ...schema.locations import FunctionPath
from ..auxiliary_model import AuxiliaryModel
from ..rollouts.rollout import Event, Rollout
from .process import RewardProcess, RewardResult, RewardTask, Texts, short

if TYPE_CHECKING:
    from ...data.text.codec import Codec

logger = logging.getLogger(__name__)
OnError = Literal["stop", "skip"]


@dataclass(frozen=True)
class Rewarded:
    """The rewards of a window."""

    by_reward: Sequence[Sequence[float | None]]  # of each reward those of all rollouts
    metrics: Mapping[str, float] = field(default_factory=dict)  # what functions logged
    extras: Mapping[str, Sequence[object]] = field(default_factory=dict)  # the same of each rollout


class Reward(Protocol):
    """How responses are rewarded. Its fields are its settings in the recipe. It is computed in a
    process of its own as a ``task``, or by a frozen ``model`` beside the policy."""

    weight: float

    @property
    def name(self) -> str:
        """What it is called in metrics."""

    @property
    def task(self) -> RewardTask | None:
        """What the process computes; None: the model computes it."""

    @property
    def model(self) -> AuxiliaryModel | None:
        """The model; None: there is a task."""


def names_of(rewards: Sequence[Reward]) -> list[str]:
    """The name of each, with a number where it occurs again."""
    found: list[str] = []
    for reward in rewards:
        before = sum(other.name == reward.name for other in rewards[: len(found)])
        found.append(f"{reward.name}_{before + 1}" if before else reward.name)
    return found


def by_name(rewards: Sequence[Reward]) -> dict[str, Reward]:
    """The rewards by their names in metrics, which are also the roles of models."""
    return dict(zip(names_of(rewards), rewards, strict=True))


def models_of(rewards: Sequence[Reward]) -> dict[str, AuxiliaryModel]:
    """The models that compute rewards, by role."""
    found = ((name, reward.model) for name, reward in by_name(rewards).items())
    return {name: model for name, model in found if model is not None}


def computed(
    process: RewardProcess, task: RewardTask, texts: Texts, seconds: float, on_error: OnError
) -> RewardResult:
    """The rewards of ``texts``. Raises ``RunError`` for the first failure, which names the
    response; if ``on_error`` is skip, those that failed have none. What is wrong for every response
    is always raised."""
    is_one_enough = on_error == "stop"
    found = process.compute(task, texts, seconds, is_one_enough=is_one_enough)
    if not found.failures:
        return found
    said = _said(task, found, texts)
    if found.failures[0].is_fatal:
        raise RunError(said)
    if is_one_enough:
        raise RunError(f"{said}; mend it, or set on_reward_error: skip, which drops such responses")
    logger.warning("%s; skipped", said)
    return found


def rewarded(results: Sequence[RewardResult]) -> Rewarded:
    """What several rewards gave. A metric is the mean of all values that were logged for it."""
    logged: dict[str, list[float]] = {}
    for result in results:
        for name, values in result.metrics.items():
            logged.setdefault(name, []).extend(values)
    metrics = {name: sum(values) / len(values) for name, values in logged.items()}
    extras = {name: values for result in results for name, values in result.extras.items()}
    return Rewarded([result.rewards for result in results], metrics, extras)


def _said(task: RewardTask, found: RewardResult, texts: Texts) -> str:
    first = found.failures[0]
    if first.place is None:
        return f"{task.name}: {first.why}"
    more = len(found.failures) - 1
    rest = f" (and for {counted(more, 'other response')})" if more else ""
    return f"{task.name}: {texts.name(first.place)}: {first.why}{rest}"


def total(
    by_reward: Sequence[Sequence[float | None]], weights: Sequence[float]
) -> list[float | None]:
    """The weighted sum of the rewards of each response; None if it has none of them."""
    found: list[float | None] = []
    for values in zip(*by_reward, strict=True):
        known = [w * v for w, v in zip(weights, values, strict=True) if v is not None]
        found.append(sum(known) if known else None)
    return found


def means(names: Sequence[str], by_reward: Sequence[Sequence[float | None]]) -> Mapping[str, float]:
    """The mean of each reward over the responses that have it, if there are several."""
    found = {}
    for name, values in zip(names, by_reward, strict=True) if len(names) > 1 else ():
        known = [value for value in values if value is not None]
        if known:
            found[f"rewards/{name}"] = sum(known) / len(known)
    return found


def texts_of(rollouts: Sequence[Rollout], codec: Codec) -> Texts:
    """The responses of a window as rewards read them."""
    decode = codec.tokenizer.decode
    names = dict.fromkeys(name for one in rollouts for name in one.row.columns)
    return Texts(
        [decode(list(one.prompt)) for one in rollouts],
        [decode(list(one.completion), skip_special_tokens=True) for one in rollouts],
        [one.num_sampled for one in rollouts],
        {name: [one.row.columns.get(name) for one in rollouts] for name in names},
        [one.row.origin for one in rollouts] if all(r.row.origin for r in rollouts) else (),
        [one.completion for one in rollouts],
    )


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
