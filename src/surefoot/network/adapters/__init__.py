"""Adapters in a network: values computed from weights, several stored as one.

The names are imported on first use: a recipe is read without torch.
"""

from typing import TYPE_CHECKING

from ...lazy_exports import lazy_getattr

if TYPE_CHECKING:
    from .stacked_weights import StackedWeights

__all__ = ["StackedWeights"]

__getattr__ = lazy_getattr(__name__, {".stacked_weights": ("StackedWeights",)})
