"""Convert a file of TRL, axolotl or transformers' Trainer to the settings of a recipe."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ...schema import Keys, Problem
from ..document import Document
from ..from_llamafactory.arguments import ARGUMENTS
from ..from_llamafactory.arguments.argument import (
    Argument,
    NoEffect,
    Refused,
    RefusedArgumentError,
    Same,
)
from ..from_llamafactory.conversion import Translation, shown, translate
from .arguments import SOURCES, TrainerSource
from .axolotl_rules import AXOLOTL_RULES
from .given import ConvertedSettings, GivenSettings
from .rules import RULES

# Settings that LLaMA-Factory's rules make, and these programs do not ask for.
_NOT_THEIRS = ("data.dataset_dir",)
_WITHOUT_LENGTH = ("transformers",)


def translate_from(
    name: str, document: Document, environment: Mapping[str, str] = os.environ
) -> Translation:
    """The settings of a recipe for the file of ``name``, one of ``SOURCES``. Raises
    ``RecipeError``: with every setting that is unknown or not supported, each with line, reason and
    what to write instead."""
    source, problems = SOURCES[name], list[Problem]()
    if not isinstance(document.data, Mapping):
        raise document.error([Problem((), f"expected settings of {source.title}")])
    given = GivenSettings(source, dict(_values(source, document.data, problems)))
    problems += _refused(given)
    converted, where = ConvertedSettings(), dict[str, str]()
    if not problems:
        _convert(name, given, converted, where, problems)
    if problems:
        raise document.error(problems)
    found = translate(_as_arguments(document, converted, source, where), environment)
    return _finished(name, found, given, converted, where)


def _values(
    source: TrainerSource, data: Mapping[str, object], problems: list[Problem]
) -> Iterator[tuple[str, object]]:
    for name, value in data.items():
        if name not in source.arguments:
            near = difflib.get_close_matches(name, source.arguments, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            problems.append(Problem((name,), f"no setting of {source.title} that is known{hint}"))
            continue
        if value is None:
            yield name, None
            continue
        try:
            yield name, source.arguments[name].read(name, value)
        except RefusedArgumentError as error:
            problems.append(Problem((name,), str(error)))


def _refused(given: GivenSettings) -> Iterator[Problem]:
    for name, value in given.values.items():
        argument = given.source.arguments[name]
        outcome, usual = argument.outcome, given.source.defaults.get(name, argument.default)
        if not isinstance(outcome, Refused) or value is None or value == usual:
            continue
        if value not in outcome.allowed:
            yield Problem((name,), f"{shown(value)} is not supported: {outcome.reason}")


def _convert(
    name: str,
    given: GivenSettings,
    to: ConvertedSettings,
    where: dict[str, str],
    problems: list[Problem],
) -> None:
    """Fill ``to``; ``where`` has the setting that each result is of."""
    for setting, argument in given.source.arguments.items():
        if setting in given.values or not _is_shared(setting, argument):
            _single(setting, argument, given, to, where)
    for setting, value in given.source.defaults.items():
        to.arguments.setdefault(setting, value)
    rules = AXOLOTL_RULES if name == "axolotl" else RULES[name]
    for setting, rule in rules:
        before = {*to.arguments, *to.settings}
        try:
            rule(given, to)
        except RefusedArgumentError as error:
            problems.append(Problem((error.argument,), str(error)))
        where.update(dict.fromkeys({*to.arguments, *to.settings} - before, setting))


def _is_shared(name: str, argument: Argument) -> bool:
    """Whether an unset setting has LLaMA-Factory's default."""
    return name in ARGUMENTS and ARGUMENTS[name] is argument


def _single(
    name: str,
    argument: Argument,
    given: GivenSettings,
    to: ConvertedSettings,
    where: dict[str, str],
) -> None:
    """A setting by itself. One that is unset has its program's default."""
    value, outcome = given[name], argument.outcome
    if _is_shared(name, argument):
        if value is not None and not isinstance(outcome, NoEffect | Refused):
            to.arguments[name], where[name] = value, name
    elif isinstance(outcome, Same) and value is not None:
        target = to.settings if "." in outcome.setting else to.arguments
        target[outcome.setting], where[outcome.setting] = value, name


def _as_arguments(
    document: Document, to: ConvertedSettings, source: TrainerSource, where: Mapping[str, str]
) -> Document:
    """The same as a file of LLaMA-Factory, whose errors name the lines of the original."""
    data = {**to.arguments, "do_train": True, "stage": source.equivalent}
    data = {name: value for name, value in data.items() if value is not None}
    marks: dict[Keys, tuple[int, int]] = {
        (name,): document.marks[(where.get(name, name),)]
        for name in data
        if (where.get(name, name),) in document.marks
    }
    return Document(data, document.name, marks=marks)


def _finished(
    name: str,
    found: Translation,
    given: GivenSettings,
    to: ConvertedSettings,
    where: Mapping[str, str],
) -> Translation:
    """With the settings that are not by way of LLaMA-Factory's arguments, and other notes."""
    settings = {**found.settings, **to.settings}
    if given.source.has_own_stage:  # in place of what LLaMA-Factory's rules have made of it
        settings = {n: v for n, v in settings.items() if not n.startswith("stage")}
        settings |= {n: v for n, v in to.settings.items() if n.startswith("stage")}
    for setting in _NOT_THEIRS:
        settings.pop(setting, None)
    if name in _WITHOUT_LENGTH:
        settings.pop("data.cutoff_len", None)
    ignored = [
        setting
        for setting in given.values
        if isinstance(given.source.arguments[setting].outcome, NoEffect)
    ]
    origins = {s: found.origins.get(s) or where.get(s) or "output_dir" for s in settings}
    return replace(
        found,
        settings=settings,
        origins=origins,
        head=f"settings of {given.source.title} as a recipe",
        differences=[*to.notes, *_true(found.differences, name, settings)],
        mistakes=(),
        without_effect=ignored,
    )


def _true(lines: Sequence[str], name: str, settings: Mapping[str, object]) -> Iterator[str]:
    """Without the line about truncation where nothing is truncated."""
    is_cut = settings.get("data.on_too_long") != "drop" and name not in ("trl-grpo", "transformers")
    yield from (line for line in lines if is_cut or not line.startswith("long examples"))
