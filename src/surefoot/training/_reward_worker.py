"""The process that computes rewards: a function of a user's file, or one of the rules below.

It is run by its path and imports nothing of Surefoot, so that it starts in a tenth of a second.
Each line on stdin is a task, each line on what was stdout its result; what a function prints goes
to stderr.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

Columns = Mapping[str, Sequence[object]]
Values = Sequence[object]
Function = Callable[["Responses"], Values]
POLL_SECONDS = 1.0


class WrongError(Exception):
    """What this file finds wrong with a reward or an environment."""


class FatalError(WrongError):
    """What is wrong with it for every response, so that no response can be skipped for it."""


class Responses:
    """Responses to be rewarded, and the settings of the reward."""

    def __init__(self, task: Mapping[str, Any], at: Sequence[int]) -> None:
        """Those of ``task`` at the places ``at``."""
        self.settings: Mapping[str, Any] = task["settings"]
        self.prompts: Sequence[str] = [task["prompts"][i] for i in at]
        self.completions: Sequence[str] = [task["completions"][i] for i in at]
        self.lengths: Sequence[int] = [task["lengths"][i] for i in at]  # tokens
        self.ids: Sequence[Sequence[int]] = [task["ids"][i] for i in at] if task["ids"] else []
        self.environments = [_SESSIONS.get(task["sessions"][i]) for i in at] if _SESSIONS else []
        self.metrics: dict[str, list[float]] = {}  # what the function logs
        self.extras: dict[str, list[object]] = {}
        columns = task["columns"].items()
        self.columns: Columns = {name: [values[i] for i in at] for name, values in columns}

    def column(self) -> Sequence[object]:
        """The column that the settings name. Raises ``WrongError`` if the dataset has none."""
        name = self.settings["column"]
        if name not in self.columns:
            column_names = ", ".join(self.columns) or "none"
            raise FatalError(f"the dataset has no column {name!r} (its columns: {column_names})")
        return self.columns[name]

    def arguments(self) -> dict[str, object]:
        """What a function may take, by the names of TRL. Where the column ``prompt`` of a row is a
        list of messages, prompt and completion are lists of messages, too."""
        prompts, completions = list[object](self.prompts), list[object](self.completions)
        for i, prompt in enumerate(self.columns.get("prompt", ())):
            if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
                prompts[i] = prompt
                completions[i] = [{"role": "assistant", "content": self.completions[i]}]
        by_name = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": self.ids,
            "log_metric": self._log_metric,
            "log_extra": self._log_extra,
        }
        if self.environments:
            by_name["environments"] = self.environments
        return {**self.columns, **by_name}

    def _log_metric(self, name: str, value: float) -> None:
        if not math.isfinite(number := _number(value)):
            raise WrongError(f"log_metric({name!r}): expected a finite number, got {value!r}")
        self.metrics.setdefault(str(name), []).append(number)

    def _log_extra(self, column: str, values: Sequence[object]) -> None:
        if len(values) != len(self.completions):
            counts = f"{len(values)} for {_counted(len(self.completions), 'completion')}"
            raise FatalError(f"log_extra({column!r}): expected a value for each, got {counts}")
        self.extras[str(column)] = list(values)


def function(responses: Responses) -> Values:
    """The user's, called as TRL calls it: with the columns that it names, or with all if it takes
    ``**kwargs``."""
    user_function = _loaded(responses.settings["path"])
    arguments = responses.arguments()
    signature = inspect.signature(user_function)
    parameters = signature.parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        parameter_names = {parameter.name for parameter in parameters}
        arguments = {name: values for name, values in arguments.items() if name in parameter_names}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        columns = ", ".join(responses.columns) or "none"
        others = ", ".join(sorted(responses.arguments().keys() - responses.columns.keys()))
        raise FatalError(f"{error}; it may take columns ({columns}) and {others}") from None
    (rewards,) = _finished([user_function(**arguments)])
    if isinstance(rewards, Exception):
        raise rewards
    if isinstance(rewards, (str, bytes, dict)) or not hasattr(rewards, "__iter__"):
        raise FatalError(f"returned {rewards!r}; expected a list with a number for each completion")
    return list(rewards)


def exact_match(responses: Responses) -> Values:
    """1 if a response is the text of the column, except for space around it."""
    pairs = zip(responses.completions, responses.column(), strict=True)
    return [None if gold is None else float(_same(text, gold)) for text, gold in pairs]


def regex(responses: Responses) -> Values:
    """1 if the pattern is found; with a column, if the first group of the last match is its
    text."""
    pattern = re.compile(responses.settings["pattern"], re.DOTALL)
    if responses.settings["column"] is None:
        return [float(pattern.search(text) is not None) for text in responses.completions]
    group = 1 if pattern.groups else 0
    answers = [
        matches[-1].group(group) if (matches := [*pattern.finditer(text)]) else None
        for text in responses.completions
    ]
    pairs = zip(answers, responses.column(), strict=True)
    # a group that took no part in its match is None, like a response without a match
    return [None if gold is None else float(t is not None and _same(t, gold)) for t, gold in pairs]


def length(responses: Responses) -> Values:
    """DAPO's soft punishment (arXiv:2503.14476, equation 13): from 0 at ``soft_limit`` tokens down
    to -1 at ``hard_limit``."""
    soft, hard = responses.settings["soft_limit"], responses.settings["hard_limit"]
    return [-min(1.0, max(0.0, (count - soft) / (hard - soft))) for count in responses.lengths]


RULES: Mapping[str, Function] = {
    "function": function,
    "exact_match": exact_match,
    "regex": regex,
    "length": length,
}


def _same(text: str, gold: object) -> bool:
    return text.strip() == str(gold).strip()


def _finished(values: Sequence[object]) -> list[object]:
    """``values``, of coroutines what they return or raise: all run at the same time."""
    if not any(inspect.isawaitable(value) for value in values):
        return list(values)

    async def finish(value: object) -> object:
        return await value if inspect.isawaitable(value) else value

    async def finish_all() -> list[object]:
        return await asyncio.gather(*map(finish, values), return_exceptions=True)

    if not _LOOP:  # one for all calls: clients that a file keeps belong to theirs
        _LOOP.append(asyncio.new_event_loop())
    return list(_LOOP[0].run_until_complete(finish_all()))


_LOOP: list[Any] = []
_FILES: set[str] = set()  # of the user's, as tracebacks name them
_MODULES: dict[str, ModuleType] = {}  # by file, which is run once: its parts share what they know


def _loaded(path: str) -> Callable[..., Any]:
    """The function at ``file.py:name``. Raises ``FatalError`` if there is none."""
    file, _, name = path.rpartition(":")
    if file not in _MODULES:
        spec = importlib.util.spec_from_file_location(f"_reward_{Path(file).stem}", file)
        if spec is None or spec.loader is None or not Path(file).is_file():
            raise FatalError(f"there is no Python file {file}")
        _FILES.add(spec.origin or file)
        module = importlib.util.module_from_spec(spec)
        # What lies beside it, or in the current folder, can be imported by name, but is never taken
        # for a module that Python or a package has.
        sys.path += [at for at in (str(Path(file).parent), str(Path.cwd())) if at not in sys.path]
        sys.modules[spec.name] = module  # dataclasses of the file look themselves up
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise FatalError(_error_text(error)) from error
        _MODULES[file] = module
    user_function: Callable[..., Any] | None = vars(_MODULES[file]).get(name)
    if user_function is None or not callable(user_function):
        raise FatalError(f"{file} defines no {name}")
    return user_function


def result(task: Mapping[str, Any]) -> dict[str, Any]:
    """``rewards`` of all responses, and ``errors`` by place of those that failed alone; or the
    ``error`` of all."""
    count = len(task["completions"])
    if not count:  # only checked
        try:
            if task["rule"] == "function":
                _loaded(task["settings"]["path"])
        except Exception as error:
            return {"error": _error_text(error)}
        return {"rewards": [], "errors": {}, "metrics": {}, "extras": {}}
    try:
        return {**_computed(task, range(count)), "errors": {}}
    except FatalError as error:
        return {"error": _error_text(error), "is_fatal": True}
    except Exception as error:
        batch_error = _error_text(error)
    return _one_by_one(task, count, batch_error)


_SESSIONS: dict[int, Any] = {}  # objects of the user's environment, by the conversation


def replies(task: Mapping[str, Any]) -> dict[str, Any]:
    """What the user's environment says to each response: a message, or None at the end. Without a
    response, its object is only made."""
    events = task["events"]
    answers, messages = list[object](), list[dict[str, str] | None]()
    try:
        for event in events:
            if event["is_first"]:
                _SESSIONS[event["session"]] = _loaded(task["settings"]["path"])(event["row"])
            step, response = _SESSIONS[event["session"]].step, event["response"]
            answers.append(None if response is None else step(response))
        for answer in _finished(answers):
            messages.append(_message(answer))
    except Exception as error:
        # a step failed, or, after all of them, what the next one answered is no message
        place = len(answers) if len(answers) < len(events) else len(messages)
        return {"error": _error_text(error), "place": place}
    return {"replies": messages}


def _message(answer: object) -> dict[str, str] | None:
    if isinstance(answer, Exception):
        raise answer
    if answer is None:
        return None
    if isinstance(answer, str):
        return {"role": "user", "content": answer}
    if (
        isinstance(answer, dict)
        and answer.get("role") in ("user", "tool")
        and "content" in answer
        and all(isinstance(text, str) for text in answer.values())
    ):
        return answer
    raise WrongError(
        'expected text, {"role": "user" or "tool", "content": text} (and other texts that the '
        f'chat template reads, such as "name") or None from step, got {answer!r}'
    )


def _one_by_one(task: Mapping[str, Any], count: int, batch_error: str) -> dict[str, Any]:
    rewards: list[float | None] = []
    errors: dict[str, str] = {}
    metrics: dict[str, list[float]] = {}
    extras: dict[str, list[object]] = {}
    for i in range(count):
        try:
            computed = _computed(task, [i])
        except Exception as error:
            rewards.append(None)
            errors[str(i)] = _error_text(error)
            continue
        rewards += computed["rewards"]
        for name, values in computed["metrics"].items():
            metrics.setdefault(name, []).extend(values)
        for name, (value,) in computed["extras"].items():
            extras.setdefault(name, [None] * count)[i] = value
    is_general = len(errors) == count > 1 and len({*errors.values()}) == 1
    if not errors or is_general:  # no row is at fault
        return {"error": batch_error}
    return {"rewards": rewards, "errors": errors, "metrics": metrics, "extras": extras}


def _computed(task: Mapping[str, Any], at: Sequence[int]) -> dict[str, Any]:
    responses = Responses(task, at)
    rewards = RULES[task["rule"]](responses)
    if len(rewards) != len(at):
        counts = f"{_counted(len(rewards), 'reward')} for {_counted(len(at), 'completion')}"
        raise FatalError(f"gave {counts}")
    numbers = [_checked(reward) for reward in rewards]
    return {"rewards": numbers, "metrics": responses.metrics, "extras": responses.extras}


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _checked(value: object) -> float | None:
    if value is None:
        return None
    if not math.isfinite(number := _number(value)):
        raise WrongError(f"expected a finite number or None for a reward, got {value!r}")
    return number


def _number(value: object) -> float:
    """NaN for what is none; text is none, whatever it says: "1" may be a mistake for a label."""
    try:
        return math.nan if isinstance(value, (str, bytes)) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def _error_text(error: BaseException) -> str:
    """``error`` with the line of the user's file that raised it, or that called what did."""
    if isinstance(error, WrongError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = next((f for f in reversed(frames) if f.filename in _FILES), None)
    where = f" ({Path(place.filename).name}:{place.lineno})" if place else ""
    return f"{type(error).__name__}: {error}{where}"


def _end_with(parent: int) -> None:
    """End this process when the one that has started it is gone, whatever a function does."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)


def main() -> None:
    """Compute every task on stdin until it ends."""
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):  # for the trainer
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    tasks: TextIO = os.fdopen(os.dup(0), encoding="utf-8")
    results: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for line in tasks:
        task = json.loads(line)
        try:
            reply = replies(task) if "events" in task else result(task)
        except SystemExit as error:  # Python would print its text as it is
            reply = {"error": _error_text(error)}
        try:
            results.write(f"{json.dumps(reply, default=str)}\n")
            results.flush()
        except BrokenPipeError:  # the process that trains was killed
            os._exit(1)


if __name__ == "__main__":
    main()
