"""The arguments of one file, and the programs that they are of."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...parallel.section import launched
from .arguments import ARGUMENTS, RefusedError, Rows

Settings = dict[str, object]  # dotted settings of a recipe


@dataclass(frozen=True)
class Program:
    """A program, or one of its trainers."""

    title: str
    arguments: Rows
    renaming: tuple[tuple[str, RenamingRule], ...] = ()  # with the arguments that they are of
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
    arguments: Rows = field(default_factory=lambda: ARGUMENTS)

    def __getitem__(self, name: str) -> Any:
        """The value of an argument, or its default; None for one that the program has not."""
        if name in self.values:
            return self.values[name]
        known = self.arguments.get(name)
        return None if known is None else known.default

    def sets(self, *names: str) -> bool:
        """Whether one of these is set, to whatever value."""
        return any(name in self.values for name in names)

    def of(self, *names: str) -> dict[str, Any]:
        """The arguments among ``names`` that are set."""
        return {name: self.values[name] for name in names if name in self.values}

    def on(self, section: str, names: Mapping[str, str]) -> Settings:
        """Settings of a section, each with its argument, as far as that is neither false, zero nor
        empty."""
        return {f"{section}.{here}": self[name] for here, name in names.items() if self[name]}

    def is_on(self, variable: str) -> bool:
        """Whether an environment variable is on, by LLaMA-Factory's words."""
        return self.environment.get(variable, "0").lower() in ("true", "y", "1")

    def one_of(self, name: str, table: Mapping[str, Any], instead: str) -> Any:
        """What ``table`` has for the value of an argument. Raises ``RefusedError``."""
        if self[name] not in table:
            message = f"{self[name]!r} is not supported: {instead} ({', '.join(table)})"
            raise RefusedError(name, message)
        return table[self[name]]

    @property
    def num_ranks(self) -> int:
        """The ranks of the run: those that the launcher has started, or one for each GPU."""
        if (found := launched(self.environment)) is not None:
            return found[1]
        if (count := self.environment.get("NPROC_PER_NODE", "")).isdecimal():
            return max(1, int(count))
        return int(self["ray_num_workers"]) if self.is_on("USE_RAY") else _num_gpus()


def _num_gpus() -> int:
    """GPUs of this machine, at least 1. torch is not imported where there is no driver."""
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/kfd").exists():
        return 1
    import torch

    return max(1, torch.cuda.device_count())


@dataclass
class RenamedArguments:
    """Another trainer's arguments as LLaMA-Factory's, and those that are settings already."""

    arguments: dict[str, object] = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


Rule = Callable[[GivenArguments], Settings]  # the settings that depend on several arguments
RenamingRule = Callable[[GivenArguments, RenamedArguments], None]
