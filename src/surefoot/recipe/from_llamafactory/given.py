"""The arguments of one file or command line: their values, and their defaults where unset."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...parallel.launch_environment import launched
from .arguments import ARGUMENTS
from .arguments.argument import RefusedArgumentError


@dataclass(frozen=True)
class GivenArguments:
    """Values by argument, of the argument's type. None is unset."""

    values: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def __getitem__(self, name: str) -> Any:
        """The value of an argument, or its default."""
        return self.values[name] if name in self.values else ARGUMENTS[name].default

    def sets(self, *names: str) -> bool:
        """Whether one of these is set, to whatever value."""
        return any(name in self.values for name in names)

    def of(self, *names: str) -> dict[str, Any]:
        """The arguments among ``names`` that are set."""
        return {name: self.values[name] for name in names if name in self.values}

    def is_on(self, variable: str) -> bool:
        """Whether an environment variable is on, by their words."""
        return self.environment.get(variable, "0").lower() in ("true", "y", "1")

    @property
    def num_ranks(self) -> int:
        """The ranks of the run: those that the launcher has started, or one for each GPU."""
        if (found := launched(self.environment)) is not None:
            return found[1]
        if (count := self.environment.get("NPROC_PER_NODE", "")).isdecimal():
            return max(1, int(count))
        if self.is_on("USE_RAY"):
            return int(self["ray_num_workers"])
        return _num_gpus()

    @property
    def is_launched(self) -> bool:
        """Whether the ranks exist already."""
        return launched(self.environment) is not None


def _num_gpus() -> int:
    """GPUs of this machine, at least 1. torch is not imported where there is no driver."""
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/kfd").exists():
        return 1
    import torch

    return max(1, torch.cuda.device_count())


Settings = dict[str, object]  # dotted settings of a recipe
Rule = Callable[[GivenArguments], Settings]


def one_of(given: GivenArguments, name: str, table: Mapping[str, Any], instead: str) -> Any:
    """What ``table`` has for the value of an argument. Raises ``RefusedArgumentError``."""
    if given[name] not in table:
        known = ", ".join(table)
        raise RefusedArgumentError(name, f"{given[name]!r} is not supported: {instead} ({known})")
    return table[given[name]]
