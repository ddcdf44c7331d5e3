"""Convert LLaMA-Factory's arguments to the settings of a recipe.

``arguments`` is the table of all of them. ``rules`` make the settings that depend on several.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...schema import Keys, Problem
from ..document import Document
from .after_training import AFTER, AfterTraining, evaluations_of
from .arguments import ARGUMENTS
from .arguments.argument import NoEffect, OtherCommand, Refused, RefusedArgumentError, Same
from .commands import other_commands
from .differences import DIFFERENCES, MISTAKES, said
from .given import GivenArguments
from .rules import RULES

_SIGNS = ("model_name_or_path", "finetuning_type", "do_train", "per_device_train_batch_size")
HEAD = "settings of LLaMA-Factory (`surefoot recipe convert` prints them as a recipe)"


@dataclass(frozen=True)
class Translation:
    """The settings of a recipe, and what differs from LLaMA-Factory."""

    settings: Mapping[str, object]  # dotted, as overrides are
    origins: Mapping[str, str]  # the argument that a setting is of
    document: Document
    differences: Sequence[str] = ()
    mistakes: Sequence[str] = ()
    without_effect: Sequence[str] = ()
    trains: bool = True
    after: AfterTraining | None = None  # evaluations after training, or instead of it
    head: str = HEAD

    def notes(self) -> Iterator[str]:
        """A few lines to print before a run."""
        yield f"{self.head}:"
        yield from (f"  differs: {line}" for line in self.differences)
        yield from (f"  LLaMA-Factory: {line}" for line in self.mistakes)
        if self.without_effect:
            yield f"  without effect here: {', '.join(self.without_effect)}"

    def check_trains(self) -> None:
        """Raises ``RecipeError``: the arguments ask for nothing that a run does."""
        if not self.trains and self.after is None:
            message = "is not set; `surefoot eval` evaluates this stage"
            raise self.document.error([Problem(("do_train",), message)])

    def origin(self, setting: str) -> str:
        """Where a setting comes from, for errors: the file, the line and the argument."""
        name = self.origins[setting]
        mark = self.document.marks.get((name,))
        if (name,) in self.document.overrides:
            return self.document.overrides[(name,)]
        place = f"{self.document.name}:{mark[0]}:{mark[1]} " if mark else ""
        return f"{place}{name}"


@dataclass
class _Builder:
    """Collects settings and problems."""

    settings: dict[str, object] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)

    def add(self, found: Mapping[str, object], argument: str) -> None:
        for setting, value in found.items():
            self.settings[setting] = value
            self.origins[setting] = argument


def is_llamafactory(data: object) -> bool:
    """Whether the content of a file is LLaMA-Factory's, and not a recipe with a key of theirs."""
    if not isinstance(data, Mapping) or {"model", "data", "train"} <= data.keys():
        return False
    return any(name in data for name in _SIGNS)


def translate(document: Document, environment: Mapping[str, str] = os.environ) -> Translation:
    """The settings of the arguments in ``document``. Raises ``RecipeError``: with every argument
    that is unknown or not supported, each with line, reason and what to write instead."""
    data = document.data
    assert isinstance(data, Mapping)
    built = _Builder()
    given = GivenArguments(dict(_values(data, built.problems)), environment)
    for name, value in given.values.items():
        _single(name, value, built)
    if not built.problems:
        built.problems += other_commands(given)
    if not built.problems:
        _combined(given, built)
    if built.problems:
        raise document.error(built.problems)
    return Translation(
        settings=built.settings,
        origins=built.origins,
        document=document,
        differences=list(said(DIFFERENCES, given)),
        mistakes=[*_misread(document), *said(MISTAKES, given)],
        without_effect=built.without_effect,
        trains=bool(given["do_train"]),
        after=evaluations_of(given),
    )


def given_arguments(document: Document, environment: Mapping[str, str]) -> GivenArguments:
    """The arguments in ``document``. Raises ``RecipeError`` as ``translate``."""
    assert isinstance(document.data, Mapping)
    built = _Builder()
    given = GivenArguments(dict(_values(document.data, built.problems)), environment)
    for name, value in given.values.items():
        _single(name, value, built)
    if built.problems:
        raise document.error(built.problems)
    return given


def with_values(document: Document, values: Mapping[str, object]) -> Document:
    """``document`` with other values of some arguments, from the command line."""
    if not values or not isinstance(document.data, Mapping):
        return document
    origins: dict[Keys, str] = {(name,): f"command line: {name}" for name in values}
    data = {**document.data, **values}
    return replace(document, data=data, overrides={**document.overrides, **origins})


NULLS = ("enable_thinking",)  # whose null is a value, not the default


def _values(data: Mapping[str, object], problems: list[Problem]) -> Iterator[tuple[str, object]]:
    for name, value in data.items():
        if name not in ARGUMENTS:
            near = difflib.get_close_matches(name, ARGUMENTS, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            problems.append(Problem((name,), f"no argument of LLaMA-Factory{hint}"))
            continue
        if value is None:
            yield from ((name, None) for null in NULLS if null == name)
            continue
        try:
            yield name, ARGUMENTS[name].read(name, value)
        except RefusedArgumentError as error:
            problems.append(Problem((name,), str(error)))


def _single(name: str, value: object, built: _Builder) -> None:
    """The setting of one argument by itself, or why there is none."""
    argument = ARGUMENTS[name]
    outcome = argument.outcome
    asks = value != argument.default and value not in ([], "", {})
    if isinstance(outcome, Same):
        built.add({outcome.setting: value}, name)
    elif isinstance(outcome, Refused) and asks and value not in outcome.allowed:
        built.problems.append(
            Problem((name,), f"{shown(value)} is not supported: {outcome.reason}")
        )
    elif isinstance(outcome, NoEffect | OtherCommand):
        built.without_effect.append(name)


def _combined(given: GivenArguments, built: _Builder) -> None:
    if not given.sets("cutoff_len"):
        built.add({"data.cutoff_len": given["cutoff_len"]}, "cutoff_len")
    for argument, rule in (*RULES, *AFTER):
        try:
            built.add(rule(given), argument)
        except RefusedArgumentError as error:
            built.problems.append(Problem((error.argument,), str(error)))


def _misread(document: Document) -> Iterator[str]:
    """Text of a file that they take for true, as it is not empty."""
    assert isinstance(document.data, Mapping)
    for name, value in document.data.items():
        is_text = isinstance(value, str) and value.strip().lower() in ("false", "no", "0", "off")
        is_of_file = (name,) not in document.overrides
        if is_text and is_of_file and name in ARGUMENTS and ARGUMENTS[name].kind == "bool":
            yield f"in a file, {name}: {value!r} is text, which counts as true"


def shown(value: object) -> str:
    """A value as it is in a file."""
    return f"{value!r}" if not isinstance(value, bool) else str(value).lower()
