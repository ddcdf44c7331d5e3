"""Rewards computed in a process of their own, with a time limit.

What a function of a user's does to its process (hang, crash, change its state) cannot reach the run
that trains.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import RunError
from ..storage.child import Child

logger = logging.getLogger(__name__)
WORKER = Path(__file__).with_name("_reward_worker.py")  # run by its path


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
        one = slice(place, place + 1)
        parts = self.prompts[one], self.completions[one], self.lengths[one]
        columns = {name: values[one] for name, values in self.columns.items()}
        return Texts(*parts, columns, self.origins[one], self.ids[one], [place])

    def name(self, place: int) -> str:
        """A response, for messages."""
        origin = self.origins[place] if self.origins else f"prompt {place + 1} of the window"
        return f"{origin} (response {short(self.completions[place])})"


@dataclass(frozen=True)
class RewardTask:
    """A reward, as the process knows it."""

    name: str  # for messages
    rule: str
    settings: Mapping[str, object]


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


class LateError(Exception):
    """The limit is over."""


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

    def check(self, task: RewardTask, seconds: float) -> None:
        """Raise ``RunError`` unless ``task`` can be computed: its file is run."""
        empty = Texts((), (), (), {})
        found = self.compute(task, empty, seconds)
        if found.failures:
            raise RunError(f"{task.name}: {found.failures[0].why}")

    def compute(
        self, task: RewardTask, texts: Texts, seconds: float, *, is_one_enough: bool = True
    ) -> RewardResult:
        """The rewards of ``texts``, all in one call. If it fails, or takes more than ``seconds``,
        the responses are tried one by one, to find those that are at fault, or the first of those
        that take too long if ``is_one_enough``."""
        count = len(texts.completions)
        try:
            reply = self._ask(task, texts, seconds)
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
        for place in range(count):
            try:
                reply = self._ask(task, texts.at(place), seconds)
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
        given = {"settings": {"path": path}, "events": list(events)}
        if any(event["is_first"] for event in events):
            self._steps = []
        try:
            reply = self._send(given, seconds)
        except LateError:
            return {"error": f"took more than {seconds:g} seconds (reward_timeout)"}
        self._steps.append((given, reply))
        return reply

    def _ask(self, task: RewardTask, texts: Texts, seconds: float) -> dict[str, Any]:
        """The rewards of ``texts``. Raises ``LateError``."""
        given = {
            "rule": task.rule,
            "settings": dict(task.settings),
            "prompts": list(texts.prompts),
            "completions": list(texts.completions),
            "lengths": list(texts.lengths),
            "ids": [list(ids) for ids in texts.ids],
            "sessions": list(texts.sessions or range(len(texts.completions))),
            "columns": {name: list(values) for name, values in texts.columns.items()},
        }
        return self._send(given, seconds)

    def _send(self, given: Mapping[str, object], seconds: float) -> dict[str, Any]:
        """The process's answer. Raises ``LateError``, and ends the process then."""
        reply = self._answer(given, seconds)
        if "killed_by" in reply:
            by = reply["killed_by"]
            logger.warning("the process of rewards was killed by %s; it is started again", by)
            reply = self._answer(given, seconds)
        return reply

    def _answer(self, given: Mapping[str, object], seconds: float) -> dict[str, Any]:
        """The same of one attempt."""
        if self._child is None or self._child.code is not None:
            self._child = Child([str(WORKER)], talks=True, patience=0)
            for earlier, answer in self._steps:
                if (now := self._exchange(earlier, seconds)) != answer:
                    why = now.get("error", "it answers the same responses in another way")
                    return {"error": f"the environment's process ended, and a new one: {why}"}
        return self._exchange(given, seconds)

    def _exchange(self, given: Mapping[str, object], seconds: float) -> dict[str, Any]:
        """What the running process answers; how it has ended, if a function has ended it."""
        assert self._child is not None
        with contextlib.suppress(EOFError):
            if self._child.send(given):
                answer = self._child.answer(seconds)
                if answer is None:
                    self.end()
                    raise LateError
                return answer
        found = {"error": f"ended its process {self._child.ending}"}
        if (by := self._child.killed_by) is not None:
            found["killed_by"] = by
        self.end()
        return found

    def end(self) -> None:
        """End the process, with all that it has started."""
        if self._child is not None:
            self._child.end()
            self._child = None


def short(text: str) -> str:
    """A response, for messages."""
    shown = repr(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
