"""AdamW with its moments in 4 bits (arXiv:2309.01507): an eighth of the state.

As with 8 bits, with a scale for each 128 numbers of a row. The 16 values of a code are torchao's:
a dynamic map for the first moment, and 1/16 to 1 for the second, which is never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..optimizer import StateTensor
from .adamw_8bit import AdamW8bit, state_in_codes


@dataclass(frozen=True, kw_only=True)
class AdamW4bit(AdamW8bit):
    """AdamW with the moments of matrices in 4 bits (arXiv:2309.01507): an eighth of its state."""

    bits: ClassVar[int] = 4
    block: ClassVar[int] = 128
    state_tensors: ClassVar[Mapping[str, StateTensor]] = state_in_codes(
        lambda width: -(-width // 2), block
    )

    def trainer_arguments(self) -> dict[str, object]:
        """The Trainer's is that of torchao, whose state is another."""
        return {"weight_decay": self.weight_decay}
