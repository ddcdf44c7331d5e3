"""A pretrained model: loading, packed attention, outputs, and what files contain of it.

The names are imported when they are first asked for: a recipe is read without torch.
"""

from typing import TYPE_CHECKING

from ..later import found_in

if TYPE_CHECKING:
    from .weights import AdapterWeights, FullWeights

__all__ = ["AdapterWeights", "FullWeights"]

__getattr__ = found_in(__name__, {".weights": ("AdapterWeights", "FullWeights")})
