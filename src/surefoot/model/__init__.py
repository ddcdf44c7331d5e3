"""A pretrained model: loading, packed attention, outputs, and its weights in files.

The names are imported on first use: a recipe is read without torch.
"""

from typing import TYPE_CHECKING

from ..lazy_exports import lazy_getattr

if TYPE_CHECKING:
    from .pretrained.weights import AdapterWeights, FullWeights

__all__ = ["AdapterWeights", "FullWeights"]

__getattr__ = lazy_getattr(__name__, {".pretrained.weights": ("AdapterWeights", "FullWeights")})
