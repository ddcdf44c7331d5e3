"""Rewards of sampled responses: what each kind is, their sum, and the errors of a window.

A reward is a user's function or a rule, which a process of its own computes with a time limit, or
a frozen model beside the policy. What a function of a user's does to its process (hang, crash,
change its state) cannot reach the run that trains. To add a rule: write its dataclass and its
function, add its line to ``REWARDS``.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from ..batch import SCORES, OutputSpec
from ..data.example import Example, Message
from ..errors import RunError, counted
from ..schema.locations import FunctionPath, ModelPath
from ..storage.child import Child
from .rollout import Event, Rollout

if TYPE_CHECKING:
    from ..data.text.codec import Codec

logger = logging.getLogger(__name__)
WORKER = Path(__file__).with_name("_reward_worker.py")  # run by its path
OnError = Literal["stop", "skip"]
LEAST_SECONDS = 60.0  # that a file may take to be run


@dataclass(frozen=True)
class AuxiliaryModel:
    """A frozen model beside the policy. One that computes ahead, before the first step, is freed
    then. One of the windows stays: ``prepare`` can compute with it, and the outputs of the policy
    may be divergences from it."""

    spec: OutputSpec
    model: ModelPath | None = None  # None: the policy as it was before the first step
    when: Literal["ahead", "window"] = "ahead"


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


@dataclass(frozen=True)
class Rewarded:
    """The rewards of a window."""

    by_reward: Sequence[Sequence[float | None]]  # of each reward those of all rollouts
    metrics: Mapping[str, float] = field(default_factory=dict)  # what functions logged
    extras: Mapping[str, Sequence[object]] = field(default_factory=dict)  # the same of each rollout


def names_of(rewards: Sequence[Reward]) -> list[str]:
    """The name of each, with a number where it occurs again."""
    names: list[str] = []
    for reward in rewards:
        before = sum(other.name == reward.name for other in rewards[: len(names)])
        names.append(f"{reward.name}_{before + 1}" if before else reward.name)
    return names


def by_name(rewards: Sequence[Reward]) -> dict[str, Reward]:
    """The rewards by their names in metrics, which are also the roles of models."""
    return dict(zip(names_of(rewards), rewards, strict=True))


def models_of(rewards: Sequence[Reward]) -> dict[str, AuxiliaryModel]:
    """The models that compute rewards, by role."""
    pairs = ((name, reward.model) for name, reward in by_name(rewards).items())
    return {name: model for name, model in pairs if model is not None}


def total(
    by_reward: Sequence[Sequence[float | None]], weights: Sequence[float]
) -> list[float | None]:
    """The weighted sum of the rewards of each response; None if it has none of them."""
    totals: list[float | None] = []
    for values in zip(*by_reward, strict=True):
        weighted = [w * v for w, v in zip(weights, values, strict=True) if v is not None]
        totals.append(sum(weighted) if weighted else None)
    return totals


def means(names: Sequence[str], by_reward: Sequence[Sequence[float | None]]) -> Mapping[str, float]:
    """The mean of each reward over the responses that have it, if there are several."""
    by_metric = {}
    for name, values in zip(names, by_reward, strict=True) if len(names) > 1 else ():
        present = [value for value in values if value is not None]
        if present:
            by_metric[f"rewards/{name}"] = sum(present) / len(present)
    return by_metric


@dataclass(frozen=True)
class Texts:
    """Responses as rewards read them: lists of equal length."""

    prompts: Sequence[str]
    completions: Sequence[str]
    lengths: Sequence[int]  # tokens of each completion
    columns: Mapping[str, Sequence[object]]  # of their rows
    origins: Sequence[str] = ()  # of the rows, for messages
    ids: Sequence[Sequence[int]] = ()  # of completions
    sessions: Sequence[int] = ()  # the conversation of each, if it is not its place

    def at(self, place: int) -> Texts:
        """The response at ``place`` alone."""
        span = slice(place, place + 1)
        parts = self.prompts[span], self.completions[span], self.lengths[span]
        columns = {name: values[span] for name, values in self.columns.items()}
        return Texts(*parts, columns, self.origins[span], self.ids[span], [place])

    def name(self, place: int) -> str:
        """A response, for messages."""
        origin = self.origins[place] if self.origins else f"prompt {place + 1} of the window"
        return f"{origin} (response {short(self.completions[place])})"


NO_TEXTS = Texts((), (), (), {})


def texts_of(rollouts: Sequence[Rollout], codec: Codec) -> Texts:
    """The responses of a window as rewards read them."""
    decode = codec.tokenizer.decode
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.row.columns)
    return Texts(
        [decode(list(rollout.prompt)) for rollout in rollouts],
        [codec.response_text(rollout.completion) for rollout in rollouts],
        [rollout.num_sampled for rollout in rollouts],
        {name: [rollout.row.columns.get(name) for rollout in rollouts] for name in names},
        [rollout.row.origin for rollout in rollouts] if all(r.row.origin for r in rollouts) else (),
        [rollout.completion for rollout in rollouts],
    )


def last_responses(examples: Sequence[Example]) -> Texts:
    """The last response of each example, or some text where it has none, as rewards read it; there
    are no tokens yet."""
    prompts, completions = list[str](), list[str]()
    for example in examples:
        contents = [message.content for message in example.messages]
        has_response = bool(contents) and example.messages[-1].role == "assistant"
        completions.append(contents.pop() if has_response else "A response.")
        prompts.append("\n".join(contents))
    columns = dict.fromkeys(name for example in examples for name in example.columns)
    return Texts(
        prompts,
        completions,
        lengths=[1] * len(examples),
        columns={name: [example.columns.get(name) for example in examples] for name in columns},
        origins=[example.origin for example in examples],
        ids=[[0]] * len(examples),
    )


@dataclass(frozen=True)
class RewardTask:
    """A reward, as the process knows it."""

    name: str  # for messages
    rule: str
    settings: Mapping[str, object]

    def request(self, texts: Texts) -> dict[str, object]:
        """What the process is sent for the rewards of ``texts``."""
        return {
            "rule": self.rule,
            "settings": dict(self.settings),
            "prompts": list(texts.prompts),
            "completions": list(texts.completions),
            "lengths": list(texts.lengths),
            "ids": [list(ids) for ids in texts.ids],
            "sessions": list(texts.sessions or range(len(texts.completions))),
            "columns": {name: list(values) for name, values in texts.columns.items()},
        }


@dataclass(frozen=True)
class RewardFailure:
    """A response whose reward could not be computed; without a place, all of them."""

    place: int | None
    why: str
    is_fatal: bool = False  # whatever the responses are


@dataclass(frozen=True)
class RewardResult:
    """Rewards, None where there is none, and failures."""

    rewards: list[float | None]
    failures: Sequence[RewardFailure] = ()
    metrics: Mapping[str, Sequence[float]] = field(default_factory=dict)  # what a function logged
    extras: Mapping[str, Sequence[object]] = field(default_factory=dict)  # of each response


def computed(
    process: RewardProcess, task: RewardTask, texts: Texts, seconds: float, on_error: OnError
) -> RewardResult:
    """The rewards of ``texts``. Raises ``RunError`` for the first failure, which names the
    response; if ``on_error`` is skip, those that failed have none. What is wrong for every response
    is always raised."""
    is_one_enough = on_error == "stop"
    result = process.compute(task, texts, seconds, is_one_enough=is_one_enough)
    if not result.failures:
        return result
    message = _failure_message(task, result, texts)
    if result.failures[0].is_fatal:
        raise RunError(message)
    if is_one_enough:
        raise RunError(
            f"{message}; fix it, or set on_reward_error: skip, which drops such responses"
        )
    logger.warning("%s; skipped", message)
    return result


def rewarded(results: Sequence[RewardResult]) -> Rewarded:
    """What several rewards gave. A metric is the mean of all values that were logged for it."""
    logged: dict[str, list[float]] = {}
    for result in results:
        for name, values in result.metrics.items():
            logged.setdefault(name, []).extend(values)
    metrics = {name: sum(values) / len(values) for name, values in logged.items()}
    extras = {name: values for result in results for name, values in result.extras.items()}
    return Rewarded([result.rewards for result in results], metrics, extras)


def _failure_message(task: RewardTask, result: RewardResult, texts: Texts) -> str:
    first = result.failures[0]
    if first.place is None:
        return f"{task.name}: {first.why}"
    more = len(result.failures) - 1
    rest = f" (and for {counted(more, 'other response')})" if more else ""
    return f"{task.name}: {texts.name(first.place)}: {first.why}{rest}"


def stepped(
    process: RewardProcess, path: FunctionPath, events: Sequence[Event], seconds: float
) -> list[Message | None]:
    """What the environment says to each response. Raises ``RunError``, which names the row."""
    event_rows = [
        {
            "session": event.session,
            "row": dict(event.row.columns) if event.is_first else None,
            "response": event.response,
            "is_first": event.is_first,
        }
        for event in events
    ]
    reply = process.step(str(path), event_rows, seconds)
    if "error" not in reply:
        return [None if message is None else _message(**message) for message in reply["replies"]]
    where = ""
    if (at := reply.get("place")) is not None:
        where = f" {events[at].row.origin} (response {short(events[at].response or '')}):"
    raise RunError(f"{path}:{where} {reply['error']}")


def _message(role: Literal["user", "tool"], content: str, **fields: str) -> Message:
    return Message(role, content, fields=fields)


@dataclass
class RewardProcess:
    """The process, started with the first task and again after it has been ended.

    A task during which a signal kills it, such as the kernel's when memory is short, is tried once
    more. The environments of the window live in the process: a new one gets all their responses
    again, and must answer as before.
    """

    _child: Child | None = field(default=None, init=False)
    _steps: list[tuple[Mapping[str, object], Mapping[str, object]]] = field(
        default_factory=list, init=False
    )  # of the window's environments, and what they answered

    def check(self, task: RewardTask) -> None:
        """Raise ``RunError`` unless ``task`` can be computed: its file is run."""
        result = self.compute(task, NO_TEXTS, LEAST_SECONDS)
        if result.failures:
            raise RunError(f"{task.name}: {result.failures[0].why}")

    def compute(
        self, task: RewardTask, texts: Texts, seconds: float, *, is_one_enough: bool = True
    ) -> RewardResult:
        """The rewards of ``texts``, all in one call. If it fails, or takes more than ``seconds``,
        the responses are tried one by one, to find those that are at fault, or the first of those
        that take too long if ``is_one_enough``."""
        count = len(texts.completions)
        try:
            reply = self._send(task.request(texts), seconds)
        except LateError:
            why = f"took more than {seconds:g} seconds (reward_timeout)"
            return self._hanging(task, texts, seconds, why, is_one_enough=is_one_enough)
        if "error" in reply:
            failure = RewardFailure(None, reply["error"], "is_fatal" in reply)
            return RewardResult([None] * count, [failure])
        failures = [RewardFailure(int(at), why) for at, why in reply["errors"].items()]
        return RewardResult(reply["rewards"], failures, reply["metrics"], reply["extras"])

    def _hanging(
        self, task: RewardTask, texts: Texts, seconds: float, why: str, *, is_one_enough: bool
    ) -> RewardResult:
        rewards: list[float | None] = []
        failures: list[RewardFailure] = []
        count = len(texts.completions)
        if count < 2:
            return RewardResult([None] * count, [RewardFailure(0 if count else None, why)])
        # One by one, so that the message names the row that hangs. It costs a limit of time for
        # each, so a single one is enough where the run stops anyway.
        for place in range(count):
            try:
                reply = self._send(task.request(texts.at(place)), seconds)
            except LateError:
                reply = {"error": why}
            if "error" in reply:
                failures.append(RewardFailure(place, reply["error"]))
            rewards += reply.get("rewards", [None])
            if failures and is_one_enough:
                return RewardResult([None] * count, failures)
        return RewardResult(rewards, failures or [RewardFailure(None, why)])

    def step(
        self, path: str, events: Sequence[Mapping[str, object]], seconds: float
    ) -> dict[str, Any]:
        """``replies`` of a user's environment to responses, or an ``error``, perhaps with the
        ``place`` of its response."""
        request = {"settings": {"path": path}, "events": list(events)}
        # A new window: the environments of the last one are gone, and need not be told again.
        if any(event["is_first"] for event in events):
            self._steps = []
        try:
            reply = self._send(request, seconds)
        except LateError:
            return {"error": f"took more than {seconds:g} seconds (reward_timeout)"}
        self._steps.append((request, reply))
        return reply

    def _send(self, request: Mapping[str, object], seconds: float) -> dict[str, Any]:
        """The process's answer. Raises ``LateError``, and ends the process then."""
        reply = self._restarted(seconds) or self._exchange(request, seconds)
        if "killed_by" in reply:
            by = reply["killed_by"]
            logger.warning("the process of rewards was killed by %s; it is started again", by)
            reply = self._restarted(seconds) or self._exchange(request, seconds)
        return reply

    def _restarted(self, seconds: float) -> dict[str, Any] | None:
        """Start the process if there is none; an ``error`` if its environments cannot be as those
        that were lost."""
        if self._child is not None and self._child.code is None:
            return None
        # By its path, as a program: `spawn` would import the script that called us, and `fork`
        # copies locks (docs/decisions/0052).
        self._child = Child([str(WORKER)], talks=True, patience=0)
        for earlier, answer in self._steps:
            if (now := self._exchange(earlier, seconds)) != answer:
                why = now.get("error", "it answers the same responses in another way")
                return {"error": f"the environment's process ended, and a new one: {why}"}
        return None

    def _exchange(self, request: Mapping[str, object], seconds: float) -> dict[str, Any]:
        """What the running process answers; how it has ended, if a function has ended it."""
        assert self._child is not None
        with contextlib.suppress(EOFError):
            if self._child.send(request):
                answer = self._child.answer(seconds)
                if answer is None:
                    self.close()
                    raise LateError
                return answer
        failure = {"error": f"ended its process {self._child.ending}"}
        if (by := self._child.killed_by) is not None:
            failure["killed_by"] = by
        self.close()
        return failure

    def close(self) -> None:
        """End the process, with all that it has started."""
        if self._child is not None:
            self._child.end()
            self._child = None


class LateError(Exception):
    """The limit is over."""


def short(text: str) -> str:
    """A response, for messages."""
    shown = repr(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


@dataclass(frozen=True, kw_only=True)
class _Weighted:
    """What all rewards have."""

    weight: float = 1.0
    """By how much it is multiplied in the sum of all rewards."""

    @property
    def model(self) -> AuxiliaryModel | None:
        """The model that computes it."""
        return None


@dataclass(frozen=True, kw_only=True)
class _Rule(_Weighted):
    """What ``_reward_worker`` computes by the rule of this name and all settings but the weight."""

    name: ClassVar[str]

    @property
    def task(self) -> RewardTask:
        """Compute it."""
        names = [each.name for each in fields(self) if each.name != "weight"]
        return RewardTask(self.name, self.name, {name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class FunctionReward(_Weighted):
    """A Python function. It is called with ``prompts``, ``completions`` and the columns of the
    dataset, as lists, and returns a number for each completion, or None for one that does not
    count.
    """

    path: FunctionPath
    """File and name, such as ``rewards.py:exact_match``."""

    @property
    def name(self) -> str:
        """The function's."""
        return self.path.name

    @property
    def task(self) -> RewardTask:
        """Call it."""
        return RewardTask(str(self.path), "function", {"path": str(self.path)})


@dataclass(frozen=True, kw_only=True)
class ExactMatch(_Rule):
    """1 if the response is the text of a column, but for space around it, else 0."""

    column: str
    """The column of the dataset."""
    name: ClassVar[str] = "exact_match"


@dataclass(frozen=True, kw_only=True)
class Regex(_Rule):
    """1 if a regular expression is found in the response, else 0."""

    pattern: str
    """A regular expression of Python's; ``.`` matches line breaks, too."""
    column: str | None = None
    """A column of the dataset: what is found last (its first group, if it has one) must be the
    text of the column.
    """
    name: ClassVar[str] = "regex"

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern: not a regular expression: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Length(_Rule):
    """0 up to ``soft_limit`` tokens, then less, down to -1 at ``hard_limit`` (soft overlong
    punishment, arXiv:2503.14476).
    """

    soft_limit: int
    """The most tokens of a response without a punishment."""
    hard_limit: int
    """The fewest tokens with the full one."""
    name: ClassVar[str] = "length"

    def __post_init__(self) -> None:
        if not 0 <= self.soft_limit < self.hard_limit:
            raise ValueError(
                f"soft_limit must be at least 0 and less than hard_limit, got {self.soft_limit} "
                f"and {self.hard_limit}"
            )


@dataclass(frozen=True, kw_only=True)
class RewardModel(_Weighted):
    """The score of a reward model, such as ``stage: rm`` trains, at the last token of the response.
    Its tokens must be the policy's.
    """

    path: ModelPath
    """A folder or a hub id."""
    name = "reward_model"
    task = None

    @property
    def model(self) -> AuxiliaryModel:
        """It stays in memory beside the policy."""
        return AuxiliaryModel(SCORES, self.path, "window")


REWARDS: Mapping[str, type] = {
    "function": FunctionReward,
    "exact_match": ExactMatch,
    "regex": Regex,
    "length": Length,
    "reward_model": RewardModel,
}
OF_TEXT = ("function", "path")  # what a text such as rewards.py:f is
