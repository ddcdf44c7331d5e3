"""AdamW with its moments in bfloat16: half of the state. They are rounded stochastically, since
the nearest value of a slow average would never change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ..adamw import Adam
from ..rules import modules as rules
from ..state_tensor import LIKE_PARAMETER, SCALAR, StateTensor

if TYPE_CHECKING:
    from ..rules.rule_optimizer import Update


@dataclass(frozen=True, kw_only=True)
class AdamWBf16(Adam):
    """AdamW with moments in bfloat16, rounded stochastically: half of its state."""

    is_entrywise: ClassVar[bool] = True
    state_tensors: ClassVar[Mapping[str, StateTensor]] = {
        "step": SCALAR,
        "exp_avg": replace(LIKE_PARAMETER, dtype="bfloat16"),
        "exp_avg_sq": replace(LIKE_PARAMETER, dtype="bfloat16"),
    }

    def update(self, update: Update) -> None:
        """Update one parameter."""
        kept = update.tensor("exp_avg"), update.tensor("exp_avg_sq")
        noise = rules.rounding.noise_for(update.number, f"moments {update.name}", update.parameter)
        settings = (self.beta1, self.beta2, self.epsilon)
        for value, grad, *narrow in rules.chunks.chunked(update.value, update.grad, *kept):
            wide = narrow[0].float(), narrow[1].float()
            update.adamw_of(value, grad, wide, settings)
            for moment, into in zip(wide, narrow, strict=True):
                rules.rounding.round_stochastically(moment, into, noise)
