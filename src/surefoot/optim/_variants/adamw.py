"""AdamW (arXiv:1711.05101), torch's fused one, and the settings of all that have Adam's moments;
with moments in bfloat16, half of the state, and in codes of 8 bits (arXiv:2110.02861) or 4 bits.

Moments in bfloat16 are rounded stochastically, since the nearest value of a slow average would
never change. Of codes, each block of numbers of a row has a scale, and vectors keep float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ...parallel.sharding import AxisShard
from ...schema import must
from .._rules import modules as rules
from ..optimizer import Named, Optimizer
from ..state_tensor import LIKE_PARAMETER, SCALAR, ParameterKind, ParameterKinds, Shape, StateTensor

if TYPE_CHECKING:
    import torch

    from .._rules.rule_optimizer import Update


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """What optimizers with Adam's moments have in common."""

    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""

    def __post_init__(self) -> None:
        super().__post_init__()
        must(self, "be in [0, 1)", "beta1", "beta2")
        must(self, "be positive", "epsilon")


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay; decays matrices only, never biases and norms."""

    is_entrywise: ClassVar[bool] = True
    state_tensors: ClassVar[Mapping[str, StateTensor]] = {
        "step": SCALAR,
        "exp_avg": LIKE_PARAMETER,
        "exp_avg_sq": LIKE_PARAMETER,
    }

    def build(self, named: Named, layouts: ParameterKinds | None = None) -> torch.optim.Optimizer:
        """Torch's own, with its fused kernel."""
        return rules.rule_optimizer.FusedAdamW(
            self.groups(named, layouts or {}),
            lr=self.learning_rate,
            betas=(self.beta1, self.beta2),
            eps=self.epsilon,
            fused=True,
        )


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
        moments = update.tensor("exp_avg"), update.tensor("exp_avg_sq")
        # Another name than the weight's: both are rounded in this
        # update, and not by the same noise.
        noise = rules.few_bits.noise_for(update.number, f"moments {update.name}", update.parameter)
        settings = (self.beta1, self.beta2, self.epsilon)
        for value, grad, *narrow in rules.few_bits.chunked(update.value, update.grad, *moments):
            wide = narrow[0].float(), narrow[1].float()
            update.adamw_of(value, grad, wide, settings)
            for moment, into in zip(wide, narrow, strict=True):
                rules.few_bits.round_stochastically(moment, into, noise)


def _is_matrix(shape: Shape, _: ParameterKind) -> bool:
    return len(shape) >= 2


def _is_vector(shape: Shape, _: ParameterKind) -> bool:
    return len(shape) < 2


def _rows(shape: Shape, cuts: tuple[AxisShard, ...]) -> tuple[AxisShard, ...] | None:
    """The shards of rows; None if the columns are sharded, and with them the blocks."""
    return None if any(cut.dim == len(shape) - 1 for cut in cuts) else cuts


def state_in_codes(codes_of: Callable[[int], int], block: int) -> Mapping[str, StateTensor]:
    """Adam's state of matrices in codes, of which a row has as many bytes as ``codes_of`` says, and
    a scale for each ``block``; of vectors in float32. The values of the codes are those of
    bitsandbytes' dynamic map."""

    def row_of(count: Callable[[int], int], dtype: str) -> StateTensor:
        return StateTensor(lambda shape: (*shape[:-1], count(shape[-1])), _rows, dtype, _is_matrix)

    codes, scales = row_of(codes_of, "uint8"), row_of(lambda width: -(-width // block), "float32")
    return {
        "step": SCALAR,
        "exp_avg_codes": codes,
        "exp_avg_scales": scales,
        "exp_avg_sq_codes": codes,
        "exp_avg_sq_scales": scales,
        "exp_avg": replace(LIKE_PARAMETER, belongs_to=_is_vector),
        "exp_avg_sq": replace(LIKE_PARAMETER, belongs_to=_is_vector),
    }


@dataclass(frozen=True, kw_only=True)
class AdamW8bit(Adam):
    """AdamW with the moments of matrices in 8 bits (arXiv:2110.02861): a quarter of its state."""

    bits: ClassVar[int] = 8
    block: ClassVar[int] = 256  # numbers of a row that have one scale
    state_tensors: ClassVar[Mapping[str, StateTensor]] = state_in_codes(lambda width: width, block)

    def update(self, update: Update) -> None:
        """Update one parameter."""
        if update.parameter.ndim < 2:
            update.adamw(self.beta1, self.beta2, self.epsilon)
            return
        keys = [
            f"{key}_{part}" for key in ("exp_avg", "exp_avg_sq") for part in ("codes", "scales")
        ]
        tensors = (update.value, update.grad, *map(update.tensor, keys))
        settings, blockwise = (self.beta1, self.beta2, self.epsilon), rules.few_bits
        signed, unsigned = (
            blockwise.codebook(self.bits, self.block, update.value.device, is_signed=is_signed)
            for is_signed in (True, False)
        )
        for value, grad, *codes in rules.few_bits.chunked(*tensors):
            mean = blockwise.dequantized(codes[0], codes[1], value.shape[-1], signed)
            square = blockwise.dequantized(codes[2], codes[3], value.shape[-1], unsigned)
            update.adamw_of(value, grad, (mean, square), settings)
            blockwise.quantize(mean, codes[0], codes[1], signed)
            blockwise.quantize(square, codes[2], codes[3], unsigned)


@dataclass(frozen=True, kw_only=True)
class AdamW4bit(AdamW8bit):
    """AdamW with the moments of matrices in 4 bits (arXiv:2309.01507): an eighth of its state.
    The 16 values of a code are torchao's: a dynamic map for the first moment, and 1/16 to 1 for the
    second, which is never zero."""

    bits: ClassVar[int] = 4
    block: ClassVar[int] = 128
    state_tensors: ClassVar[Mapping[str, StateTensor]] = state_in_codes(
        lambda width: -(-width // 2), block
    )
