"""AdamW with its moments in 8 bits (arXiv:2110.02861): a quarter of the state.

Each block of 256 numbers of a row has a scale. The 256 values of a code are those of bitsandbytes'
dynamic map. Vectors keep float32. Written in torch alone, so that rows can be sharded and saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ...geometry.sharding import AxisShard
from ..adamw import AdamW
from ..groups import Named, parameter_groups
from ..optimizer import LIKE_PARAMETER, SCALAR, Shape, StateTensor
from ..parameter_kind import ParameterKind, ParameterKinds
from ..rules import lazy_names as rules

if TYPE_CHECKING:
    import torch

    from ..rules.rule_optimizer import Update

BLOCK = 256  # numbers of a row that have one scale


def _is_matrix(shape: Shape, _: ParameterKind) -> bool:
    return len(shape) >= 2


def _is_vector(shape: Shape, _: ParameterKind) -> bool:
    return len(shape) < 2


def _rows(shape: Shape, cuts: tuple[AxisShard, ...]) -> tuple[AxisShard, ...] | None:
    """The shards of rows; None if the columns are sharded, and with them the blocks."""
    return None if any(cut.dim == len(shape) - 1 for cut in cuts) else cuts


_CODES = StateTensor(lambda shape: shape, _rows, "uint8", _is_matrix)
_SCALES = StateTensor(
    lambda shape: (*shape[:-1], -(-shape[-1] // BLOCK)), _rows, "float32", _is_matrix
)


@dataclass(frozen=True, kw_only=True)
class AdamW8bit(AdamW):
    """AdamW with the moments of matrices in 8 bits (arXiv:2110.02861): a quarter of its state."""

    is_entrywise: ClassVar[bool] = False  # blocks of a row share a scale
    state_tensors: ClassVar[Mapping[str, StateTensor]] = {
        "step": SCALAR,
        "exp_avg_codes": _CODES,
        "exp_avg_scales": _SCALES,
        "exp_avg_sq_codes": _CODES,
        "exp_avg_sq_scales": _SCALES,
        "exp_avg": replace(LIKE_PARAMETER, belongs_to=_is_vector),
        "exp_avg_sq": replace(LIKE_PARAMETER, belongs_to=_is_vector),
    }

    def build(self, named: Named, layouts: ParameterKinds | None = None) -> torch.optim.Optimizer:
        """The optimizer over ``named`` parameters; every group carries their ``names``."""
        groups = parameter_groups(named, self, self.weight_decay)
        return rules.build(self, groups, self.update, layouts)

    def update(self, update: Update) -> None:
        """Update one parameter."""
        if update.parameter.ndim < 2:
            rules.adamw(update, self.beta1, self.beta2, self.epsilon)
            return
        kept = {
            key: (update.tensor(f"{key}_codes"), update.tensor(f"{key}_scales"))
            for key in ("exp_avg", "exp_avg_sq")
        }
        mean = rules.dequantized(*kept["exp_avg"], block=BLOCK, is_signed=True)
        square = rules.dequantized(*kept["exp_avg_sq"], block=BLOCK, is_signed=False)
        rules.adamw_of(update, mean, square, (self.beta1, self.beta2, self.epsilon))
        rules.quantize(mean, *kept["exp_avg"], block=BLOCK, is_signed=True)
        rules.quantize(square, *kept["exp_avg_sq"], block=BLOCK, is_signed=False)

    def trainer_arguments(self) -> dict[str, object]:
        """The Trainer's is that of bitsandbytes, whose state is another."""
        return {"weight_decay": self.weight_decay}
