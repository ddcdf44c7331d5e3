"""The process that computes rewards: a function of a user's file, or one of the rules below.

It is run by its path and imports nothing of Surefoot, so that it starts in a tenth of a second.
Each line on stdin is a task, each line on what was stdout its result; what a function prints goes
to stderr.
"""

from __future__ import annotations

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
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

Columns = Mapping[str, Sequence[object]]
Values = Sequence[object]
Function = Callable[["Responses"], Values]
POLL_SECONDS = 1.0


class WrongError(Exception):
    """What this file finds wrong with a reward or an environment."""


class Responses:
    """Responses to be rewarded, and the settings of the reward."""

    def __init__(self, task: Mapping[str, Any], at: Sequence[int]) -> None:
        """Those of ``task`` at the places ``at``."""
        self.settings: Mapping[str, Any] = task["settings"]
        self.prompts: Sequence[str] = [task["prompts"][i] for i in at]
        self.completions: Sequence[str] = [task["completions"][i] for i in at]
        self.lengths: Sequence[int] = [task["lengths"][i] for i in at]  # tokens
        columns = task["columns"].items()
        self.columns: Columns = {name: [values[i] for i in at] for name, values in columns}

    def column(self) -> Sequence[object]:
        """The column that the settings name. Raises ``WrongError`` if the dataset has none."""
        name = self.settings["column"]
        if name not in self.columns:
            known = ", ".join(self.columns) or "none"
            raise WrongError(f"the dataset has no column {name!r} (its columns: {known})")
        return self.columns[name]


def function(given: Responses) -> Values:
    """The user's, called as TRL calls it: with the columns that it names, or with all if it takes
    ``**kwargs``."""
    called = _loaded(given.settings["path"])
    named = {"prompts": given.prompts, "completions": given.completions, **given.columns}
    parameters = inspect.signature(called).parameters.values()
    if not any(one.kind is one.VAR_KEYWORD for one in parameters):
        taken = {one.name for one in parameters}
        named = {name: values for name, values in named.items() if name in taken}
    return list(called(**named))


def exact_match(given: Responses) -> Values:
    """1 if a response is the text of the column, except for space around it."""
    pairs = zip(given.completions, given.column(), strict=True)
    return [None if gold is None else float(_same(text, gold)) for text, gold in pairs]


def regex(given: Responses) -> Values:
    """1 if the pattern is found; with a column, if the first group of the last match is its
    text."""
    pattern = re.compile(given.settings["pattern"], re.DOTALL)
    if given.settings["column"] is None:
        return [float(pattern.search(text) is not None) for text in given.completions]
    found = [[*pattern.finditer(text)][-1:] for text in given.completions]
    taken = [
        (one[0].group(1) if pattern.groups else one[0].group()) if one else None for one in found
    ]
    pairs = zip(taken, given.column(), strict=True)
    return [None if gold is None else float(t is not None and _same(t, gold)) for t, gold in pairs]


def json_schema(given: Responses) -> Values:
    """1 if a response is JSON that the schema allows."""
    import jsonschema  # type: ignore[import-untyped]

    schema = json.loads(Path(given.settings["schema"]).read_text(encoding="utf-8"))
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    validator = kind(schema)

    def is_valid(text: str) -> bool:
        try:
            return bool(validator.is_valid(json.loads(text)))
        except (ValueError, RecursionError):
            return False

    return [float(is_valid(text)) for text in given.completions]


def length(given: Responses) -> Values:
    """DAPO's soft punishment (arXiv:2503.14476, equation 13): from 0 at ``soft_limit`` tokens down
    to -1 at ``hard_limit``."""
    soft, hard = given.settings["soft_limit"], given.settings["hard_limit"]
    return [-min(1.0, max(0.0, (count - soft) / (hard - soft))) for count in given.lengths]


def server(given: Responses) -> Values:
    """What a server says to a POST of JSON: ``{"rewards": [...]}``."""
    body = {"prompts": given.prompts, "completions": given.completions, "columns": given.columns}
    request = urllib.request.Request(
        given.settings["url"],
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        found = json.loads(answer.read())
    if not isinstance(found, dict) or not isinstance(found.get("rewards"), list):
        raise WrongError('expected {"rewards": [...]} from the server')
    return list(found["rewards"])


RULES: Mapping[str, Function] = {
    "function": function,
    "exact_match": exact_match,
    "regex": regex,
    "json_schema": json_schema,
    "length": length,
    "server": server,
}


def _same(text: str, gold: object) -> bool:
    return text.strip() == str(gold).strip()


_KNOWN: dict[str, Callable[..., Values]] = {}  # by path; a file is run once


def _loaded(path: str) -> Callable[..., Values]:
    """The function at ``file.py:name``. Raises ``WrongError`` if there is none."""
    if path not in _KNOWN:
        file, _, name = path.rpartition(":")
        spec = importlib.util.spec_from_file_location(f"_reward_{Path(file).stem}", file)
        if spec is None or spec.loader is None or not Path(file).is_file():
            raise WrongError(f"there is no Python file {file}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses of the file look themselves up
        spec.loader.exec_module(module)
        if not callable(found := vars(module).get(name)):
            raise WrongError(f"{file} defines no {name}")
        _KNOWN[path] = found
    return _KNOWN[path]


def result(task: Mapping[str, Any]) -> dict[str, Any]:
    """``rewards`` of all responses, and ``errors`` by place of those that failed alone; or the
    ``error`` of all."""
    count = len(task["completions"])
    if not count:  # only checked
        try:
            if task["rule"] == "function":
                _loaded(task["settings"]["path"])
        except Exception as error:
            return {"error": _said(error)}
        return {"rewards": [], "errors": {}}
    try:
        return {"rewards": _computed(task, range(count)), "errors": {}}
    except Exception as error:
        whole = _said(error)
    return _one_by_one(task, count, whole)


_SESSIONS: dict[int, Any] = {}  # objects of the user's environment, by the conversation


def replies(task: Mapping[str, Any]) -> dict[str, Any]:
    """What the user's environment says to each response: a message, or None at the end."""
    found: list[dict[str, str] | None] = []
    for number, event in enumerate(task["events"]):
        try:
            if event["is_first"]:
                _SESSIONS[event["session"]] = _loaded(task["settings"]["path"])(event["row"])
            found.append(_message(_SESSIONS[event["session"]].step(event["response"])))
        except Exception as error:
            return {"error": _said(error), "place": number}
    return {"replies": found}


def _message(said: object) -> dict[str, str] | None:
    if said is None:
        return None
    if isinstance(said, str):
        return {"role": "user", "content": said}
    if (
        isinstance(said, dict)
        and said.get("role") in ("user", "tool")
        and "content" in said
        and all(isinstance(text, str) for text in said.values())
    ):
        return said
    raise WrongError(
        'expected text, {"role": "user" or "tool", "content": text} (and other texts that the '
        f'chat template reads, such as "name") or None from step, got {said!r}'
    )


def _one_by_one(task: Mapping[str, Any], count: int, whole: str) -> dict[str, Any]:
    rewards: list[float | None] = []
    errors: dict[str, str] = {}
    for i in range(count):
        try:
            rewards += _computed(task, [i])
        except Exception as error:
            rewards.append(None)
            errors[str(i)] = _said(error)
    is_general = len(errors) == count > 1 and len({*errors.values()}) == 1
    if not errors or is_general:  # no row is at fault
        return {"error": whole}
    return {"rewards": rewards, "errors": errors}


def _computed(task: Mapping[str, Any], at: Sequence[int]) -> list[float | None]:
    found = RULES[task["rule"]](Responses(task, at))
    if len(found) != len(at):
        rewards, responses = _counted(len(found), "reward"), _counted(len(at), "completion")
        raise WrongError(f"gave {rewards} for {responses}")
    return [_checked(value) for value in found]


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _checked(value: object) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise WrongError(f"expected a finite number or None for a reward, got {value!r}")
    return number


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, WrongError) else f"{type(error).__name__}: {error}"


def _end_with(parent: int) -> None:
    """End this process when the one that has started it is gone, whatever a function does."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)


def main() -> None:
    """Compute every task on stdin until it ends."""
    for number in (signal.SIGINT, signal.SIGUSR1):  # for the process that trains
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    tasks: TextIO = os.fdopen(os.dup(0), encoding="utf-8")
    results: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for line in tasks:
        task = json.loads(line)
        made = replies(task) if "events" in task else result(task)
        results.write(f"{json.dumps(made)}\n")
        results.flush()


if __name__ == "__main__":
    main()
