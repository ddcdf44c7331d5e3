"""The settings of one file: their values, and their defaults where unset."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..from_llamafactory.arguments.argument import RefusedArgumentError
from .arguments import TrainerSource


@dataclass(frozen=True)
class GivenSettings:
    """Values by setting, of the setting's type. None is unset."""

    source: TrainerSource
    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        """The value of a setting, or its default; None for one that the source has not."""
        if name in self.values:
            return self.values[name]
        if name in self.source.defaults:
            return self.source.defaults[name]
        known = self.source.arguments.get(name)
        return None if known is None else known.default


@dataclass
class ConvertedSettings:
    """What settings become: arguments of LLaMA-Factory, and settings of a recipe."""

    arguments: dict[str, object] = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


Rule = Callable[[GivenSettings, ConvertedSettings], None]


def refuse(name: str, message: str) -> RefusedArgumentError:
    """The error for a value."""
    return RefusedArgumentError(name, message)
