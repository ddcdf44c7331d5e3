"""Build the torch optimizer of settings that have a rule for the update of one parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from .groups import Named, parameter_groups
from .optimizer import Optimizer
from .parameter_kind import ParameterKinds
from .rules import modules as rules

if TYPE_CHECKING:
    import torch

    from .rules.rule_optimizer import Update


class UpdateRule(Optimizer, Protocol):
    """An optimizer that says how one parameter is updated."""

    @property
    def weight_decay(self) -> float:
        """Decay of matrices per step, times the learning rate."""

    def update(self, update: Update) -> None:
        """Update one parameter."""


def build_from_rule(
    settings: UpdateRule, named: Named, layouts: ParameterKinds | None = None
) -> torch.optim.Optimizer:
    """The optimizer over ``named`` parameters; every group carries their ``names``."""
    groups = parameter_groups(named, settings, settings.weight_decay)
    rule = rules.rule_optimizer.one_by_one(settings.update)
    return rules.rule_optimizer.build(settings, groups, rule, layouts)
