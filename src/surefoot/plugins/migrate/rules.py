"""What arguments mean together: the arguments of a file, and the rules of ``rules.yaml``.

A rule that no row can say is a function from the arguments to settings (``llamafactory``, ``trl``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from ...parallel.section import launched
from ...storage.remote import is_switched_on
from .arguments import ARGUMENTS, RefusedError, Rows
from .templates import masks_line_break, thinks

Settings = dict[str, object]  # dotted settings of a recipe, or other arguments
Rule = Callable[["GivenArguments"], Settings]  # the settings that depend on several arguments
Condition = Mapping[str, Any] | list[Any]
_TABLES = YAML(typ="safe").load(Path(__file__).with_name("rules.yaml"))


@dataclass(frozen=True)
class Program:
    """A program, or one of its trainers."""

    title: str
    arguments: Rows
    rules: Rules
    stage: str = "sft"  # the nearest stage of LLaMA-Factory
    has_own_stage: bool = False  # the section stage is made of the settings alone
    without_dropout: bool = False  # all dropout is disabled unless an argument keeps it
    names_data: bool = True  # its files say what is trained, and how long an example may be
    truncates: bool = True  # examples that are too long, as LLaMA-Factory does


@dataclass(frozen=True)
class GivenArguments:
    """The arguments of one file or command line: values of the arguments' types. None is unset."""

    program: Program
    values: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    table: Rows = field(default_factory=lambda: ARGUMENTS)

    def __getitem__(self, name: str) -> Any:
        """The value of an argument, or its default. A name in capitals is a switch of the
        environment, by LLaMA-Factory's words; None is for an argument of other programs."""
        if name in self.values:
            return self.values[name]
        if name in self.table:
            return self.table[name].default
        if name in _FACTS:
            return _FACTS[name](self)
        if not name.isupper():
            return None
        return is_switched_on(name, self.environment)

    def sets(self, name: str) -> bool:
        """Whether it is set, to whatever value."""
        return name in self.values

    def one_of(self, name: str, table: Mapping[str, Any], instead: str) -> Any:
        """What ``table`` has for the value of an argument. Raises ``RefusedError``."""
        if self[name] not in table:
            message = f"{self[name]!r} is not supported: {instead} ({', '.join(table)})"
            raise RefusedError(name, message)
        return table[self[name]]

    @cached_property
    def num_ranks(self) -> int:
        """The ranks of the run: those that the launcher has started, or one for each GPU."""
        if (ranks := launched(self.environment)) is not None:
            return ranks[1]
        if (count := self.environment.get("NPROC_PER_NODE", "")).isdecimal():
            return max(1, int(count))
        if self["USE_RAY"]:
            return int(self["ray_num_workers"])
        # torch is not imported where there is no driver
        if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/kfd").exists():
            return 1
        import torch

        return max(1, torch.cuda.device_count())


def _without_dropout(arguments: GivenArguments) -> bool:
    is_disabled = arguments["disable_dropout"]
    return bool(arguments.program.without_dropout if is_disabled is None else is_disabled)


# What conditions ask beside arguments
_FACTS: Mapping[str, Callable[[GivenArguments], Any]] = {
    "names_data": lambda arguments: arguments.program.names_data,
    "truncates": lambda arguments: arguments.program.truncates,
    "without_dropout": _without_dropout,
    # losses of DPO that read label_smoothing in TRL
    "smooths_labels": lambda arguments: (
        not {"robust", "exo_pair"}.isdisjoint(arguments["loss_type"])
    ),
    "num_datasets": lambda arguments: len(arguments["dataset"] or ()),
    "thinks": lambda arguments: arguments["stage"] != "pt" and thinks(arguments["template"]),
    "masks_line_break": lambda arguments: masks_line_break(arguments["template"] or ""),
}


class Rules:
    """Tables of ``rules.yaml`` by their names, and functions. Each function has the argument whose
    line an error of its settings names."""

    def __init__(self, *names: str, functions: Iterable[tuple[str, Rule]] = ()) -> None:
        self._tables = [_TABLES[name] for name in names]
        self.functions = tuple(functions)

    def refused(self, arguments: GivenArguments) -> Iterator[tuple[str, str]]:
        """The arguments that are refused, with the reason."""
        for table in self._tables:
            for argument, reason, condition in table.get("refused", ()):
                if _holds(arguments, condition):
                    yield argument, reason.format_map(arguments)

    def settings(self, arguments: GivenArguments) -> Iterator[tuple[str, Settings]]:
        """The settings of the rows that hold, with the argument that they are of."""
        for table in self._tables:
            yield from _made(arguments, table.get("settings", ()))

    def notes(self, kind: str, arguments: GivenArguments) -> Iterator[str]:
        """The lines that hold, of what ``differs``, or of the ``mistakes``."""
        for table in self._tables:
            for text, condition in table.get(kind, {}).items():
                if _holds(arguments, condition):
                    yield text.format_map(arguments)


def _made(
    arguments: GivenArguments, rows: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[str, Settings]]:
    for row in rows:
        condition = row.get("when", {})
        if not _holds(arguments, condition):
            continue
        first = condition[0] if isinstance(condition, list) else condition
        # A row that always holds is of no argument; an error of it names that of output_dir.
        yield next(iter(first), "output_dir"), row.get("is", {})
        for setting, name in row.get("of", {}).items():
            yield name, {setting: arguments[name]}
        for setting, name in row.get("on", {}).items():
            yield name, {setting: arguments[name]} if arguments[name] else {}
        yield from _made(arguments, row.get("then", ()))


def _holds(arguments: GivenArguments, condition: Condition) -> bool:
    if isinstance(condition, list):
        return any(_holds(arguments, alternative) for alternative in condition)
    return all(_fits(arguments, name, expected) for name, expected in condition.items())


def _fits(arguments: GivenArguments, name: str, expected: Any) -> bool:
    value, fits = arguments[name], False
    match expected:
        case {"set": is_set}:
            fits = arguments.sets(name) == is_set
        case {"not": other}:
            fits = not _fits(arguments, name, other)
        case {"above": bound}:
            fits = value is not None and value > bound
        case {"below": bound}:
            fits = value is not None and value < bound
        case bool():
            fits = bool(value) == expected
        case list():  # where 1 is not true
            is_bool = isinstance(value, bool)
            fits = any(value == each and is_bool == isinstance(each, bool) for each in expected)
        case _:
            fits = value == expected
    return fits
