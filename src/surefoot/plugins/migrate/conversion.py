"""Convert the arguments of LLaMA-Factory, TRL, axolotl or transformers to a recipe.

All of them have transformers' training arguments, and LLaMA-Factory has the most beside these. So
the others' are first called by LLaMA-Factory's names (``trl``, ``axolotl``), and one set of
``rules`` makes settings of them. ``arguments.yaml`` is the table of all arguments.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ...recipe.overrides import Overrides, override, put
from ...recipe.recipe import ConvertedFile, Recipe
from ...recipe.yaml import Document
from ...schema import Problem
from ...schema import settings as sections_of
from .arguments import ARGUMENTS, RefusedError, near
from .commands import other_commands
from .differences import notes as notes_on
from .given import GivenArguments, Program, RenamedArguments, Settings
from .programs import LLAMAFACTORY
from .rules import RULES
from .run_extras import LlamaFactoryExtras, after_training, check_evaluations

NULLS = ("enable_thinking",)  # of LLaMA-Factory; all other nulls there are defaults


@dataclass
class Conversion:
    """Settings as they are found, each with the argument that it is of, and what is wrong."""

    document: Document
    settings: Settings = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # by an argument, its name in the document

    def read(self, program: Program, environment: Mapping[str, str]) -> GivenArguments:
        """The arguments in the document, each with its type. Raises ``RecipeError``: with all that
        are unknown or not supported."""
        data = self.document.data
        if not isinstance(data, Mapping):
            raise self.document.error([Problem((), f"expected settings of {program.title}")])
        values = dict[str, Any]()
        for name, value in data.items():
            if name not in program.arguments:
                message = f"no argument of {program.title}{near(str(name), program.arguments)}"
                self.problems.append(Problem((name,), message))
            elif value is not None or program.renaming or name in NULLS:
                argument = program.arguments[name]
                with self.refusing():
                    values[name] = None if value is None else argument.read(name, value)
                    if argument.refuses(values[name]):
                        message = f"{shown(values[name])} is not supported: {argument.says}"
                        raise RefusedError(name, message)
        self.check()
        return GivenArguments(program, values, environment, program.arguments)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Take what is refused as a problem."""
        try:
            yield
        except RefusedError as error:
            name = self.names.get(error.argument, error.argument)
            self.problems.append(Problem((name,), str(error)))

    def check(self) -> None:
        """Raises ``RecipeError``: with all problems, each with its line."""
        if self.problems:
            raise self.document.error(self.problems)

    def renamed(self, given: GivenArguments) -> tuple[GivenArguments, RenamedArguments]:
        """Another trainer's arguments by LLaMA-Factory's names. Those that are unset have their
        program's defaults, but where they are transformers' own."""
        to = RenamedArguments({"do_train": True, "stage": given.program.stage})
        for name, argument in given.arguments.items():
            value, is_shared = given[name], ARGUMENTS.get(name) is argument
            if is_shared and name in given.values and argument.outcome in ("is", "makes"):
                to.arguments[name] = value
            elif not is_shared and argument.outcome == "is" and value is not None:
                target = to.settings if "." in argument.settings[0] else to.arguments
                target[argument.settings[0]] = value
                self.names[argument.settings[0]] = name
        for name, rule in given.program.renaming:
            before = {*to.arguments, *to.settings}
            with self.refusing():
                rule(given, to)
            self.names |= dict.fromkeys({*to.arguments, *to.settings} - before, name)
        self.check()
        values = dict[str, Any]()
        for name, value in to.arguments.items():
            if value is not None:
                with self.refusing():
                    values[name] = ARGUMENTS[name].read(name, value)
        return replace(given, values=values, arguments=ARGUMENTS), to

    def settle(self, given: GivenArguments) -> None:
        """Make the settings of LLaMA-Factory's arguments. Raises ``RecipeError``."""
        for name, value in given.values.items():
            if ARGUMENTS[name].outcome == "is":
                self._add({ARGUMENTS[name].settings[0]: value}, name)
        if not given.sets("cutoff_len") and given.program.names_data:
            self._add({"data.cutoff_len": given["cutoff_len"]}, "cutoff_len")
        for name, rule in (*RULES, ("do_predict", check_evaluations)):
            with self.refusing():
                self._add(rule(given), name)
        self.check()

    def _add(self, found: Settings, argument: str) -> None:
        self.settings |= found
        self.origins |= dict.fromkeys(found, self.names.get(argument, argument))

    def recipe(self, overrides: Overrides) -> Document:
        """The settings in the order of a recipe's sections; errors name the original's lines."""
        document = Document({name: {} for name in ("model", "data")}, self.document.name)
        for setting, value in self.settings.items():
            keys, name = tuple(setting.split(".")), self.origins[setting]
            mark = self.document.marks.get((name,))
            place = f"{self.document.name}:{mark[0]}:{mark[1]} {name}" if mark else name
            origin = self.document.overrides.get((name,), place)
            document = put(Recipe, document, keys, value, origin)
        data = document.data
        assert isinstance(data, dict)
        data = {name: data[name] for name in sections_of(Recipe) if name in data}
        return override(Recipe, replace(document, data=data), overrides)


def convert_llamafactory(
    document: Document, overrides: Overrides, environment: Mapping[str, str] = os.environ
) -> ConvertedFile:
    """The recipe of LLaMA-Factory's arguments. Raises ``RecipeError``: with every one that is
    unknown or not supported, each with line, reason and what to write instead."""
    conversion = Conversion(document)
    given = conversion.read(LLAMAFACTORY, environment)
    conversion.problems += other_commands(given)
    conversion.check()
    conversion.settle(given)
    notes = [
        "settings of LLaMA-Factory (`surefoot recipe convert` prints them as a recipe):",
        *(f"  differs: {line}" for line in notes_on("differs", given)),
        *(
            f"  LLaMA-Factory: {line}"
            for line in (*_misread(document), *notes_on("mistakes", given))
        ),
        *_ignored(given),
    ]
    extras = LlamaFactoryExtras(document, after_training(given), bool(given["do_train"]))
    return ConvertedFile(LLAMAFACTORY.title, conversion.recipe(overrides), notes, extras)


def convert_trainer(
    program: Program,
    document: Document,
    overrides: Overrides,
    environment: Mapping[str, str] = os.environ,
) -> ConvertedFile:
    """The recipe of another trainer's arguments. Raises ``RecipeError`` as above."""
    conversion = Conversion(document)
    given = conversion.read(program, environment)
    named, to = conversion.renamed(given)
    conversion.settle(named)
    settings = conversion.settings
    if program.has_own_stage:  # in place of what LLaMA-Factory's rules have made of it
        settings = {n: value for n, value in settings.items() if not n.startswith("stage")}
    settings.pop("data.dataset_dir", None)  # LLaMA-Factory's
    conversion.settings = settings | to.settings
    names = {name: conversion.names.get(name, "output_dir") for name in to.settings}
    conversion.origins = {**names, **conversion.origins}
    notes = [
        f"settings of {program.title} as a recipe:",
        *(f"  differs: {line}" for line in (*to.notes, *notes_on("differs", named))),
        *_ignored(given),
    ]
    recipe, is_complete = conversion.recipe(overrides), program.names_data
    return ConvertedFile(program.title, recipe, notes, is_complete=is_complete)


def _ignored(given: GivenArguments) -> Iterator[str]:
    """The line that lists the arguments that need no setting."""
    names = [n for n in given.values if given.arguments[n].outcome in ("ignored", "command")]
    if names:
        yield f"  without effect here: {', '.join(names)}"


def _misread(document: Document) -> Iterator[str]:
    """Text of a file that LLaMA-Factory takes for true, as it is not empty."""
    assert isinstance(document.data, Mapping)
    for name, value in document.data.items():
        is_text = isinstance(value, str) and value.strip().lower() in ("false", "no", "0", "off")
        if is_text and (name,) not in document.overrides and ARGUMENTS[name].kind == "bool":
            yield f"in a file, {name}: {value!r} is text, which counts as true"


def shown(value: object) -> str:
    """A value as it is in a file."""
    return f"{value!r}" if not isinstance(value, bool) else str(value).lower()
