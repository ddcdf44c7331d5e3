"""AdamW with its moments in bfloat16: half of the state. They are rounded stochastically, since
the nearest value of a slow average would never change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ..adamw import AdamW
from ..groups import Named, parameter_groups
from ..optimizer import LIKE_PARAMETER, SCALAR, StateTensor
from ..parameter_kind import ParameterKinds
from ..rules import lazy_names as rules

if TYPE_CHECKING:
    import torch

    from ..rules.rule_optimizer import Update


@dataclass(frozen=True, kw_only=True)
class AdamWBf16(AdamW):
    """AdamW with moments in bfloat16, rounded stochastically: half of its state."""

    state_tensors: ClassVar[Mapping[str, StateTensor]] = {
        "step": SCALAR,
        "exp_avg": replace(LIKE_PARAMETER, dtype="bfloat16"),
        "exp_avg_sq": replace(LIKE_PARAMETER, dtype="bfloat16"),
    }

    def build(self, named: Named, layouts: ParameterKinds | None = None) -> torch.optim.Optimizer:
        """The optimizer over ``named`` parameters; every group carries their ``names``."""
        groups = parameter_groups(named, self, self.weight_decay)
        return rules.build(self, groups, self.update, layouts)

    def update(self, update: Update) -> None:
        """Update one parameter."""
        kept = [update.tensor("exp_avg"), update.tensor("exp_avg_sq")]
        moments = [one.float() for one in kept]
        rules.adamw_of(update, moments[0], moments[1], (self.beta1, self.beta2, self.epsilon))
        for key, wide, narrow in zip(("mean", "square"), moments, kept, strict=True):
            noise = rules.noise_for(update.number, f"{key} {update.name}", update.parameter)
            rules.round_stochastically(wide, narrow, noise)

    def trainer_arguments(self) -> dict[str, object]:
        """The Trainer has none like it."""
        return {"weight_decay": self.weight_decay}
