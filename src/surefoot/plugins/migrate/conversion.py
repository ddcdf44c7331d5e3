"""Convert the arguments of LLaMA-Factory, TRL, axolotl or transformers to a recipe.

All of them have transformers' training arguments, and LLaMA-Factory has the most beside these. So
the others' are first called by LLaMA-Factory's names (``other_trainers``), and one set of rules
makes settings of them (``llamafactory``). ``arguments.yaml`` is the table of all arguments, and
``rules.yaml`` says what they mean together.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import did_you_mean
from ...recipe.overrides import Overrides, override, put
from ...recipe.recipe import ConvertedFile, Recipe
from ...recipe.yaml import Document
from ...schema import Problem
from ...schema import settings as sections_of
from .arguments import ARGUMENTS, Argument, RefusedError
from .commands import other_commands
from .llamafactory import (
    LLAMAFACTORY,
    template_note,
    trackers_note,
    with_present_meaning,
)
from .rules import GivenArguments, Program, Rules, Settings
from .run_extras import LlamaFactoryExtras, after_training, pictures_of


def convert_llamafactory(
    document: Document, overrides: Overrides, environment: Mapping[str, str] = os.environ
) -> ConvertedFile:
    """The recipe of LLaMA-Factory's arguments. Raises ``RecipeError``: with every one that is
    unknown or not supported, each with line, reason and what to write instead."""
    conversion = Conversion(document)
    arguments = conversion.read(LLAMAFACTORY, environment)
    conversion.problems += other_commands(arguments)
    conversion.check()
    settings = conversion.settings(arguments)
    mistakes = (*_misread(document), *LLAMAFACTORY.rules.notes("mistakes", arguments))
    notes = [
        "settings of LLaMA-Factory (`surefoot recipe convert` prints them as a recipe):",
        *(f"  differs: {line}" for line in _differences(arguments)),
        *(f"  LLaMA-Factory: {line}" for line in mistakes),
        *_ignored(arguments),
    ]
    extras = LlamaFactoryExtras(
        document,
        after_training(arguments),
        bool(arguments["do_train"]),
        pictures_of(arguments),
    )
    recipe = conversion.recipe(settings, overrides)
    return ConvertedFile(LLAMAFACTORY.title, recipe, notes, extras)


def convert_trainer(
    program: Program,
    document: Document,
    overrides: Overrides,
    environment: Mapping[str, str] = os.environ,
) -> ConvertedFile:
    """The recipe of another trainer's arguments. Raises ``RecipeError`` as above."""
    conversion = Conversion(document)
    arguments = conversion.read(program, environment)
    renamed = conversion.renamed(arguments)
    # From here on arguments have LLaMA-Factory's names, and errors must name those of the file.
    conversion.names = dict(conversion.origins)
    values: dict[str, Any] = {"do_train": True, "stage": program.stage}
    for name, value in renamed.items():
        if "." not in name and value is not None:
            with conversion.refusing():
                values[name] = ARGUMENTS[name].read(name, value)
    conversion.check()
    renamed_arguments = replace(arguments, values=values, table=ARGUMENTS)
    settings = conversion.settings(renamed_arguments)
    if program.has_own_stage:  # in place of what LLaMA-Factory's rules have made of it
        settings = {n: value for n, value in settings.items() if not n.startswith("stage")}
    settings.pop("data.dataset_dir", None)  # LLaMA-Factory's
    settings |= {name: value for name, value in renamed.items() if "." in name}
    notes = [
        f"settings of {program.title} as a recipe:",
        *(f"  differs: {line}" for line in program.rules.notes("differs", arguments)),
        *(f"  differs: {line}" for line in _differences(renamed_arguments)),
        *_ignored(arguments),
    ]
    recipe, is_complete = conversion.recipe(settings, overrides), program.names_data
    return ConvertedFile(program.title, recipe, notes, is_complete=is_complete)


@dataclass
class Conversion:
    """Where the settings that are found come from, and what is wrong."""

    document: Document
    problems: list[Problem] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    """By a setting, or an argument that another trainer's was renamed to: the document's key."""
    names: dict[str, str] = field(default_factory=dict)
    """The document's keys by the arguments that are looked at; others are its own."""

    def read(self, program: Program, environment: Mapping[str, str]) -> GivenArguments:
        """The arguments in the document, each with its type. Raises ``RecipeError``: with all that
        are unknown or not supported."""
        data = self.document.data
        if not isinstance(data, Mapping):
            raise self.document.error([Problem((), f"expected settings of {program.title}")])
        values = dict[str, Any]()
        for name, value in data.items():
            if name not in program.arguments:
                hint = did_you_mean(str(name), program.arguments)
                problem = Problem((name,), f"no argument of {program.title}{hint}")
                self.problems.append(problem)
                continue
            argument = program.arguments[name]
            with self.refusing():
                if value is not None:
                    values[name] = argument.read(name, value)
                    _refuse(name, argument, values[name])
                elif name == ("enable_thinking" if program is LLAMAFACTORY else "max_length"):
                    values[name] = None  # all other nulls are defaults
        self.check()
        # transformers' former name of eval_strategy, which older files have.
        former = values.get("evaluation_strategy")
        if former is not None and values.get("eval_strategy") in (None, "no"):
            values["eval_strategy"] = former
        if program is LLAMAFACTORY:
            values = self._present(values)
        return GivenArguments(program, values, environment, program.arguments)

    def _present(self, values: dict[str, Any]) -> dict[str, Any]:
        """Values by the present names of LLaMA-Factory's arguments; that of a present name wins."""
        present = dict[str, Any]()
        for name, value in values.items():
            argument = ARGUMENTS[name]
            if argument.outcome != "is" or argument.settings[0] not in ARGUMENTS:
                present[name] = value
            elif argument.settings[0] not in values:
                with self.refusing():
                    now = argument.settings[0]
                    present[now] = with_present_meaning(name, value)
                    present[now] = ARGUMENTS[now].read(name, present[now])
                    self.names[now] = name
        if present.get("stage") == "orpo":
            present |= {"stage": "dpo", "pref_loss": "orpo"}
        self.check()
        return present

    def renamed(self, arguments: GivenArguments) -> Settings:
        """Another trainer's arguments by LLaMA-Factory's names, and settings. Those that are unset
        have their program's defaults, but where they are transformers' own."""
        renamed: Settings = {}
        for name, argument in arguments.table.items():
            value, is_shared = arguments[name], ARGUMENTS.get(name) is argument
            if is_shared and name in arguments.values and argument.outcome in ("is", "makes"):
                renamed[name] = value
            elif not is_shared and argument.outcome == "is" and value is not None:
                renamed[argument.settings[0]] = value
                self.origins[argument.settings[0]] = name
        return renamed | self._made(arguments, arguments.program.rules)

    def settings(self, arguments: GivenArguments) -> Settings:
        """The settings of LLaMA-Factory's arguments. Raises ``RecipeError``."""
        settings: Settings = {}
        for name, value in arguments.values.items():
            if ARGUMENTS[name].outcome == "is":
                settings[ARGUMENTS[name].settings[0]] = value
                self.origins[ARGUMENTS[name].settings[0]] = self.names.get(name, name)
        return settings | self._made(arguments, LLAMAFACTORY.rules)

    def _made(self, arguments: GivenArguments, rules: Rules) -> Settings:
        """What ``rules`` make. Raises ``RecipeError``."""
        for name, reason in rules.refused(arguments):
            self.problems.append(Problem((self.names.get(name, name),), reason))
        all_settings: Settings = {}
        for name, settings in rules.settings(arguments):
            all_settings |= settings
            self.origins |= dict.fromkeys(settings, self.names.get(name, name))
        for name, rule in rules.functions:
            with self.refusing():
                settings = rule(arguments)
                all_settings |= settings
                self.origins |= dict.fromkeys(settings, self.names.get(name, name))
        self.check()
        return all_settings

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

    def recipe(self, settings: Settings, overrides: Overrides) -> Document:
        """The settings in the order of a recipe's sections; errors name the original's lines."""
        document = Document({name: {} for name in ("model", "data")}, self.document.name)
        for setting, value in settings.items():
            keys, name = tuple(setting.split(".")), self.origins[setting]
            # The recipe's own validation is the only one: its errors name the line of
            # the original (decisions/0056).
            mark = self.document.marks.get((name,))
            place = f"{self.document.name}:{mark[0]}:{mark[1]} {name}" if mark else name
            origin = self.document.overrides.get((name,), place)
            document = put(Recipe, document, keys, value, origin)
        data = document.data
        assert isinstance(data, dict)
        data = {name: data[name] for name in sections_of(Recipe) if name in data}
        return override(Recipe, replace(document, data=data), overrides)


def _refuse(name: str, argument: Argument, value: object) -> None:
    if argument.refuses(value):
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        raise RefusedError(name, f"{shown} is not supported: {argument.says}")


def _differences(arguments: GivenArguments) -> Iterator[str]:
    """What a run does differently from LLaMA-Factory."""
    yield from filter(None, (template_note(arguments), trackers_note(arguments)))
    yield from LLAMAFACTORY.rules.notes("differs", arguments)


def _ignored(arguments: GivenArguments) -> Iterator[str]:
    """The line that lists the arguments that need no setting."""
    names = [n for n in arguments.values if arguments.table[n].outcome in ("ignored", "command")]
    if names:
        yield f"  without effect here: {', '.join(names)}"


def _misread(document: Document) -> Iterator[str]:
    """Text of a file that LLaMA-Factory takes for true, as it is not empty."""
    assert isinstance(document.data, Mapping)
    for name, value in document.data.items():
        is_text = isinstance(value, str) and value.strip().lower() in ("false", "no", "0", "off")
        if is_text and (name,) not in document.overrides and ARGUMENTS[name].kind == "bool":
            yield f"in a file, {name}: {value!r} is text, which counts as true"
